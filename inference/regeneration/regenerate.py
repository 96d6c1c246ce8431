"""The target answers prompts itself: the training text that heads learn most from.

Heads guess what the target will say, not what a corpus says, so they are trained on the target's
own words. Every finished answer is kept on disk: a run that was interrupted goes on where it
stopped, and the same call made again reads instead of generating. An answer is a function of the
target, the settings and its own prompt; batches, processes and interruptions leave no trace in it
(in fp32; where bf16 rounds, a near tie may fall otherwise in another batch).
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm

from medusa_heads.files import expanded
from medusa_heads.inference.regeneration.answers import (
    EARLIER_TURN,
    TOO_LONG,
    UNKNOWN_TOKENS,
    Accounting,
    Answer,
    Backend,
    Sampling,
)
from medusa_heads.inference.regeneration.dialogues import (
    Dialogue,
    Dialogues,
    Row,
    Unanswerable,
    read_dialogues,
)
from medusa_heads.inference.regeneration.prompts import Prompt, is_greedy
from medusa_heads.inference.regeneration.store import AnswerStore, write_rows
from medusa_heads.inference.regeneration.transformers_backend import TransformersBackend
from medusa_heads.target.target import TargetModel


@dataclass(frozen=True)
class Regenerated:
    """The target's own text, in the order of the corpus, and what became of every prompt."""

    rows: Dataset  # `input_ids`, and `labels` that equal them on answers and are -100 elsewhere
    accounting: Accounting
    described: dict[str, Any]  # what decided the answers beside the prompts, as plain values


def regenerate(
    target: TargetModel,
    prompts: Dataset,
    *,
    max_new_tokens: int,
    batch_size: int = 128,
    greedy_share: float = 0.5,
    temperature: float = 0.7,
    seed: int = 0,
    cache_dir: str | os.PathLike[str],
    num_workers: int = 1,
    progress: bool = True,
) -> Dataset:
    """The target's own continuations of prompts, in their order, made with its `generate` in its
    dtype, on its device: rows of `input_ids` (prompt, continuation, ending with the end-of-text
    token where there is one) and `labels`, which equal `input_ids` on the continuation and are -100
    on the prompt. A prompt that the target ends at once gives none. Raises ValueError: no prompts,
    an impossible setting, or a text longer than the target's context.

    Args:
        prompts: a dataset with a column `input_ids`; batches of unequal lengths are padded left.
        max_new_tokens: tokens after each prompt; fewer where the target ends its text.
        greedy_share: share of the rows decoded greedily, spread evenly; the rest is sampled.
        seed: of the sampling. Equal arguments give equal rows, in batches of any size.
        cache_dir: finished answers are kept here, under a key of everything that decides them.
        num_workers: processes that share several batches; see TransformersBackend.
        progress: show a progress bar, of rows, with the tokens that were made.
    """
    if "input_ids" not in prompts.column_names or len(prompts) == 0:
        raise ValueError("expected at least one prompt in a column 'input_ids', got none")
    prompts = prompts.select_columns("input_ids")
    lengths = array("q", (len(row["input_ids"]) for row in prompts))
    if min(lengths) == 0:
        raise ValueError(f"prompt {lengths.index(0)} is empty: give it at least one token")
    sampling = Sampling(max_new_tokens, temperature, seed)
    target.check_length(max(lengths) + max_new_tokens, "prompt and continuation")
    return answer_dialogues(
        TransformersBackend(target, batch_size=batch_size, num_workers=num_workers),
        read_dialogues(prompts, None),
        sampling,
        greedy_share=greedy_share,
        cache_dir=cache_dir,
        progress=progress,
    ).rows


def answer_dialogues(
    backend: Backend,
    dialogues: Dialogues,
    sampling: Sampling,
    *,
    greedy_share: float = 0.5,
    cache_dir: str | os.PathLike[str],
    progress: bool = True,
) -> Regenerated:
    """Ask every question of every dialogue; the other arguments as `regenerate`. First all that
    have no answer yet, in any order; then the rows are read from the answers, in the order of the
    corpus. Raises ValueError: an impossible setting, or not one answer."""
    if not 0.0 <= greedy_share <= 1.0:
        raise ValueError(f"expected a greedy_share between 0 and 1, got {greedy_share}")
    described = backend.describe() | {"sampling": asdict(sampling)}
    accounting = Accounting()
    with closing(AnswerStore(expanded(cache_dir), described)) as store:
        ask = partial(_questions, sampling=sampling, backend=backend, greedy_share=greedy_share)
        with _Progress(len(dialogues), "target's text", progress) as bar:
            asking = _Asking(map(ask, dialogues), bar.done)
            for answers in backend.answer(partial(asking.take, store), sampling, bar.made):
                store.add(answers)
                for prompt, answer in answers:
                    asking.answered(store, prompt, answer)
        assert not asking.open, "a backend answers every prompt"
        with _Progress(len(dialogues), "its rows", progress) as bar:
            told = _told(bar.passed(dialogues), ask, store, accounting)
            rows = write_rows(told, store.folder)
    return Regenerated(rows, accounting, described)


Questions = Generator[Prompt, Answer, None]


def _questions(
    dialogue: Dialogue,
    *,
    sampling: Sampling,
    backend: Backend,
    greedy_share: float,
    accounting: Accounting | None = None,
    is_old: Callable[[Prompt], bool] = lambda prompt: False,
) -> Questions:
    """The prompts of a dialogue, one after the other; each is to be sent its answer."""
    accounting = accounting or Accounting()
    greedy = is_greedy(dialogue.row, greedy_share)
    silent = False
    for turn in range(dialogue.turns):
        accounting.asked += 1
        try:
            if silent:
                raise Unanswerable(EARLIER_TURN)
            input_ids, talk = dialogue.ask(turn)
            _check_fits(input_ids, sampling, backend)
        except Unanswerable as error:
            accounting.missed("skipped", error.reason, dialogue.row, turn, error.detail)
            silent = True
            continue
        prompt = Prompt(input_ids, greedy, dialogue.row, talk)
        answer = yield prompt
        if answer.failure is None:
            dialogue.take(answer.tokens)
        else:
            silent = True
        accounting.answered(answer, dialogue.row, turn, reused=is_old(prompt))


class _Asking:
    """The conversations under way: only what waits for an answer is in memory. `on_end` hears of
    each that has come to its end whether anybody was asked."""

    def __init__(
        self, conversations: Iterator[Questions], on_end: Callable[[bool], object]
    ) -> None:
        self._conversations = conversations
        self._on_end = on_end
        self._ready: deque[Prompt] = deque()  # next turns
        self.open: dict[int, Questions] = {}  # by row

    def take(self, store: AnswerStore, count: int) -> list[Prompt]:
        """Prompts without an answer: of conversations that have begun, then of others."""
        while len(self._ready) < count:
            questions = next(self._conversations, None)
            if questions is None:
                break
            self._go_on(store, questions, None)
        return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    def answered(self, store: AnswerStore, prompt: Prompt, answer: Answer) -> None:
        """Go on with the conversation that has got an answer."""
        self._go_on(store, self.open.pop(prompt.row), answer)

    def _go_on(self, store: AnswerStore, questions: Questions, answer: Answer | None) -> None:
        try:
            prompt = next(questions) if answer is None else questions.send(answer)
            while (known := store.get(prompt)) is not None:
                prompt = questions.send(known)
        except StopIteration:
            self._on_end(answer is not None)
            return
        self.open[prompt.row] = questions
        self._ready.append(prompt)


def _told(
    dialogues: Iterable[Dialogue],
    ask: Callable[..., Questions],
    store: AnswerStore,
    accounting: Accounting,
) -> Iterator[tuple[int, Row]]:
    """All rows, each with that of the corpus, and the count of what became of the questions."""
    for dialogue in dialogues:
        questions = ask(dialogue, accounting=accounting, is_old=store.is_old)
        with suppress(StopIteration):
            prompt = next(questions)
            while True:
                answer = store.get(prompt)
                assert answer is not None, "everything was answered"
                prompt = questions.send(answer)
        for row in dialogue.rows():
            yield dialogue.row, row
    accounting.check()
    if not accounting.done:
        raise ValueError(f"not one answer: {accounting}. The first: {accounting.problems[0]}")


def _check_fits(input_ids: Sequence[int], sampling: Sampling, backend: Backend) -> None:
    total, limit = len(input_ids) + sampling.max_new_tokens, backend.max_positions
    known = range(backend.vocab_size or 1 << 31)
    if strange := [token for token in (min(input_ids), max(input_ids)) if token not in known]:
        raise Unanswerable(UNKNOWN_TOKENS, f"such as {strange[0]}")
    if limit is not None and total > limit:
        raise Unanswerable(TOO_LONG, f"{total} tokens with the answer, the context is {limit}")


class _Progress(tqdm):
    """A bar of rows of the corpus that are done with, and of tokens that were made."""

    def __init__(self, rows: int, what: str, shown: bool) -> None:
        self._tokens, self._shown = 0, 0.0
        # Rows come in batches: only the mean over all of them foretells an end.
        options = {"unit": "row", "mininterval": 0.5, "smoothing": 0.0}
        super().__init__(total=rows, desc=what, disable=not shown, **options)

    def passed(self, dialogues: Dialogues) -> Iterator[Dialogue]:
        for dialogue in dialogues:
            yield dialogue
            self.update()

    def done(self, asked: bool) -> None:
        """Count a row. Those that an earlier run had answered tell nothing of this one's speed."""
        if not asked and not self.disable:
            self.initial += 1
        self.update()

    def made(self, tokens: int) -> None:
        """Count tokens, and show them now and then."""
        self._tokens += tokens
        if not self.disable and time.monotonic() - self._shown > self.mininterval:
            self._shown = time.monotonic()
            self.set_postfix_str(f"{self._tokens:,} tokens")
