"""The target answers prompts itself: the training text that heads learn most from.

Heads guess what the target will say, not what a corpus says, so they are trained on the target's
own words. Every finished answer is kept on disk: a run that was interrupted goes on where it
stopped, and the same call made again reads instead of generating. An answer is a function of the
target, the settings and its own prompt; batches, processes and interruptions leave no trace in it
(in fp32; where bf16 rounds, a near tie may fall otherwise in another batch).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value
from tqdm.auto import tqdm

from medusa_heads.inference.regeneration.answers import (
    EARLIER_TURN,
    TOO_LONG,
    UNKNOWN_TOKENS,
    Accounting,
    Backend,
    Sampling,
)
from medusa_heads.inference.regeneration.dialogues import Dialogue, Unanswerable
from medusa_heads.inference.regeneration.prompts import PromptMaker
from medusa_heads.inference.regeneration.store import AnswerStore
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
        num_workers: processes that share the batches; see TransformersBackend.
        progress: show a progress bar, in tokens.
    """
    if "input_ids" not in prompts.column_names or len(prompts) == 0:
        raise ValueError("expected at least one prompt in a column 'input_ids', got none")
    prompt_ids: list[list[int]] = list(prompts["input_ids"])
    lengths = [len(ids) for ids in prompt_ids]
    if min(lengths) == 0:
        raise ValueError(f"prompt {lengths.index(0)} is empty: give it at least one token")
    sampling = Sampling(max_new_tokens, temperature, seed)
    target.check_length(max(lengths) + max_new_tokens, "prompt and continuation")
    return answer_dialogues(
        TransformersBackend(target, batch_size=batch_size, num_workers=num_workers),
        [Dialogue(row, ids) for row, ids in enumerate(prompt_ids)],
        sampling,
        greedy_share=greedy_share,
        cache_dir=cache_dir,
        progress=progress,
    ).rows


def answer_dialogues(
    backend: Backend,
    dialogues: Sequence[Dialogue],
    sampling: Sampling,
    *,
    greedy_share: float = 0.5,
    cache_dir: str | os.PathLike[str],
    progress: bool = True,
) -> Regenerated:
    """Ask every question of every dialogue, turn by turn; the other arguments as `regenerate`.
    Raises ValueError: no dialogues, an impossible setting, or not one answer."""
    if not dialogues:
        raise ValueError("expected at least one prompt, got none")
    if not 0.0 <= greedy_share <= 1.0:
        raise ValueError(f"expected a greedy_share between 0 and 1, got {greedy_share}")
    described = backend.describe() | {"sampling": asdict(sampling)}
    store = AnswerStore(Path(cache_dir), described)
    maker = PromptMaker(greedy_share)
    accounting = Accounting(asked=sum(dialogue.turns for dialogue in dialogues))
    silent: set[int] = set()  # places of dialogues that an answer is missing in
    with _Progress(accounting.asked, sampling.max_new_tokens, progress) as bar:
        for turn in range(max(dialogue.turns for dialogue in dialogues)):
            asked = []
            for place, dialogue in enumerate(dialogues):
                if turn >= dialogue.turns:
                    continue
                try:
                    if place in silent:
                        raise Unanswerable(EARLIER_TURN)
                    input_ids, messages = dialogue.ask(turn)
                    _check_fits(input_ids, sampling, backend)
                except Unanswerable as error:
                    accounting.missed("skipped", error.reason, dialogue.row, turn, error.detail)
                    silent.add(place)
                    bar.answered(1)
                else:
                    asked.append((place, dialogue, maker(place, input_ids, messages)))
            known = {prompt.key for _, _, prompt in asked if store.get(prompt) is not None}
            bar.answered(len(known))
            new = [prompt for _, _, prompt in asked if prompt.key not in known]
            try:
                for answers in backend.answer(new, sampling, bar.update) if new else ():
                    store.add(answers)
                    bar.answered(len(answers))
            finally:
                store.flush()  # also where the user interrupts
            for place, dialogue, prompt in asked:
                answer = store.get(prompt)
                assert answer is not None, "a backend answers every prompt"
                if answer.failure is None:
                    dialogue.take(answer.tokens)
                else:
                    silent.add(place)
                accounting.answered(answer, dialogue.row, turn, reused=prompt.key in known)
    accounting.check()
    if not accounting.done:
        raise ValueError(f"not one answer: {accounting}. The first: {accounting.problems[0]}")
    return Regenerated(dataset_of(dialogues), accounting, described)


def _check_fits(input_ids: Sequence[int], sampling: Sampling, backend: Backend) -> None:
    total, limit = len(input_ids) + sampling.max_new_tokens, backend.max_positions
    known = range(backend.vocab_size or 1 << 63)
    if strange := [token for token in (min(input_ids), max(input_ids)) if token not in known]:
        raise Unanswerable(UNKNOWN_TOKENS, f"such as {strange[0]}")
    if limit is not None and total > limit:
        raise Unanswerable(TOO_LONG, f"{total} tokens with the answer, the context is {limit}")


def dataset_of(dialogues: Sequence[Dialogue]) -> Dataset:
    """The rows of all dialogues; where one has several, `document` says which rows are whose, so
    that they are held out together."""
    rows = [(place, row) for place, dialogue in enumerate(dialogues) for row in dialogue.rows()]
    columns: dict[str, list[Any]] = {
        name: [row[name] for _, row in rows] for name in ("input_ids", "labels")
    }
    kinds: dict[str, Any] = dict.fromkeys(columns, List(Value("int32")))
    places = [place for place, _ in rows]
    if len(set(places)) < len(places):
        columns["document"], kinds["document"] = places, Value("int64")
    return Dataset.from_dict(columns, Features(kinds))


class _Progress(tqdm):
    """A bar in tokens: a finished answer counts as all it could have been."""

    def __init__(self, answers: int, max_new_tokens: int, shown: bool) -> None:
        self._each, self._done = max_new_tokens, 0
        super().__init__(
            total=answers * max_new_tokens,
            desc="target's text",
            unit="tok",
            unit_scale=True,
            mininterval=0.5,
            disable=not shown,
        )

    def answered(self, count: int) -> None:
        """Answers that are finished, or will never be."""
        self._done += count
        self.update(self._done * self._each - self.n)
