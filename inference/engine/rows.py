"""One sequence of a batch: its tokens, when it ends, and who is told of them.

Shapes: T tokens, C slots of a buffer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from medusa_heads.inference.engine.given.own_code import as_generate_runs_it, row_copies
from medusa_heads.target.cache import RowCache

# These look at a row's own text, and keep no state of it.
_OF_ONE_ROW = (MaxTimeCriteria, StopStringCriteria)


class Ends(NamedTuple):
    """How a row ends where nothing else is asked: with so many tokens, padding included, or with
    one of these."""

    max_length: int
    tokens: list[int]


class StopCheck:
    """transformers' stopping criteria, asked of one row after each of its tokens.

    Length and end-of-sequence, which nearly every call has, are answered on the host. Whatever else
    the user passed is called as generate() calls it: with a whole batch, in which every row is the
    one asked about, and once a token of it. Each row asks a copy of its own; a criterion with a
    method `of_row(row)` says itself what stands for it in a row, and is then shown that row alone.
    Raises ValueError: a criterion that may keep a state, and cannot be copied for each row."""

    def __init__(self, criteria: StoppingCriteriaList, batch_size: int = 1) -> None:
        self._max_length: int | None = None
        self._eos: set[int] = set()
        # Those shown the row alone, and those shown a whole batch.
        self._alone = [StoppingCriteriaList() for _ in range(batch_size)]
        others = []
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                limit = int(criterion.max_length)
                self._max_length = min(limit, self._max_length or limit)
            elif type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.flatten().tolist())
            elif batch_size == 1 or type(criterion) in _OF_ONE_ROW:
                for alone in self._alone:
                    alone.append(criterion)
            elif hasattr(criterion, "of_row"):
                for row, alone in enumerate(self._alone):
                    alone.append(criterion.of_row(row))
            else:
                others.append(row_copies(criterion, batch_size))
        self._others_of_row = list(zip(*others, strict=True))

    @property
    def ends(self) -> Ends | None:
        """None where a criterion is asked that looks at the text, or nothing limits it."""
        if self._alone[0] or self._others_of_row or self._max_length is None:
            return None
        return Ends(self._max_length, sorted(self._eos))

    def __call__(self, row: Row) -> bool:
        """Whether the row ends with its newest token. Raises ValueError: a criterion gives one
        answer for all rows of a batch."""
        ends = row.tokens[-1] in self._eos
        ends = ends or (self._max_length is not None and row.length >= self._max_length)
        if self._alone[0] or self._others_of_row:
            with as_generate_runs_it():
                ends = self._says(row) or ends
        return ends

    def _says(self, row: Row) -> bool:
        """All are asked, whatever one of them says, as generate() asks them."""
        ends, scores = False, row.recorder.shown if row.recorder else None
        if self._alone[0]:
            ends = bool(self._alone[row.place](row.ids_1T(), scores).all())
        if self._others_of_row:
            ids_BT = row.ids_1T().repeat(row.batch_size, 1)
            for criterion in self._others_of_row[row.place]:
                answer = criterion(ids_BT, scores)
                if not isinstance(answer, Tensor) or answer.shape != (row.batch_size,):
                    raise ValueError(
                        f"{type(criterion).__name__} answers for all rows of the batch together: "
                        "let it return a tensor with one answer a row, or decode one row at a time"
                    )
                ends = ends or bool(answer[row.place])
        return ends


class ScoreRecorder:
    """Scores and logits of the committed tokens, each [1, V], as generate() returns them; `shows`
    whether it would hand the scores to stopping criteria too."""

    def __init__(self, shows: bool = False) -> None:
        self._shows = shows
        self.scores: list[Tensor] = []  # after the logits processors
        self.logits: list[Tensor] = []  # as the target gave them, in fp32

    def record(self, scores_1V: Tensor, logits_1V: Tensor) -> None:
        self.scores.append(scores_1V)
        self.logits.append(logits_1V)

    @property
    def shown(self) -> tuple[Tensor, ...] | None:
        """The scores so far, as stopping criteria are shown them."""
        return tuple(self.scores) if self._shows else None

    def given(self, name: Literal["scores", "logits"]) -> tuple[Tensor, ...]:
        """One tensor a token, to hand out: no longer inference tensors."""
        return tuple(tensor.clone() for tensor in getattr(self, name))


class Row:
    """One sequence of the batch.

    Args:
        index, batch_size: its place in the batch that the user gave, and that one's rows.
        prompt_T: its prompt, left padding included, as generate() would see it.
        stop: when it ends.
        streamer: receives every token as it is committed; if it has a method `end_step`, that is
            called after the tokens of each step.
        recorder: receives scores and logits of every token, where the user asked for them.

    Attributes:
        place: the index that it was given, by which its criteria know it in every batch.
        prompt_length: tokens of its prompt, left padding included.
        survived: what its streamer and its criteria may raise, and the row alone ends with it.
        fault: what it ended with so.
        begun: tokens of its prompt that the target had read already.
        watch: told of each token before it is committed: the logits [V] that chose it, and it.
        leaves: told when it has ended and leaves its batch: the row, the target's cache, its place
            in that and how many slots are its own.
    """

    def __init__(
        self,
        index: int,
        batch_size: int,
        prompt_T: Tensor,
        stop: StopCheck,
        streamer: Any = None,
        recorder: ScoreRecorder | None = None,
    ) -> None:
        self.index = self.place = index
        self.batch_size = batch_size
        self.tokens: list[int] = []
        self.done = False
        self.survived: tuple[type[Exception], ...] = ()
        self.fault: BaseException | None = None
        self.begun = 0
        self.watch: Callable[[Tensor, int], None] | None = None
        self.leaves: Callable[[Row, RowCache, int, int], None] | None = None
        self.recorder = recorder
        self._stop = stop
        self._streamer = streamer
        self.prompt_length = prompt_T.shape[0]
        self._ids_1C = prompt_T[None].clone()
        self._written = self.prompt_length

    @property
    def streams(self) -> bool:
        """Whether somebody receives its tokens."""
        return self._streamer is not None

    @property
    def length(self) -> int:
        """Tokens of the row so far, padding included."""
        return self.prompt_length + len(self.tokens)

    def ids_1T(self) -> Tensor:
        """The row's token ids so far, as logits processors and stopping criteria read them."""
        if self.length > self._ids_1C.shape[1]:
            with torch.inference_mode(False):  # it is asked for, and written, outside of that too
                room = self._ids_1C.new_zeros(1, self.length + 256)
                room[:, : self._written] = self._ids_1C[:, : self._written]
                self._ids_1C = room
        if self._written < self.length:
            fresh = self.tokens[self._written - self.prompt_length :]
            self._ids_1C[0, self._written : self.length] = torch.tensor(
                fresh, device=self._ids_1C.device
            )
            self._written = self.length
        return self._ids_1C[:, : self.length]

    def behind(self, length: int) -> list[int]:
        """The committed tokens after the row's first `length`, which hold at least the prompt."""
        assert length >= self.prompt_length
        return self.tokens[length - self.prompt_length :]

    def last(self, count: int) -> list[int]:
        """The row's last tokens, as many as it has of so many."""
        if count <= len(self.tokens):
            return self.tokens[-count:]
        return self.ids_1T()[0, -count:].tolist()

    def commit(self, token: int) -> bool:
        """Append a token of the target; whether the row ends with it."""
        assert not self.done
        self.tokens.append(token)
        try:
            self._stream(token)
            self.done = self._stop(self)
        except self.survived as error:
            self.fail(error)
        return self.done

    def take(self, tokens: list[int]) -> None:
        """Append tokens of a step that was taken elsewhere, where it was seen whether it ends."""
        self.tokens += tokens
        for token in tokens:
            self._stream(token)
        if tokens:
            self.end_step()

    def _stream(self, token: int) -> None:
        if self._streamer is not None:
            with as_generate_runs_it():
                self._streamer.put(torch.tensor([token]))

    def end_step(self) -> None:
        """All tokens of a step are committed."""
        if self.fault is None and hasattr(self._streamer, "end_step"):
            try:
                self._streamer.end_step()
            except self.survived as error:
                self.fail(error)

    def fail(self, fault: BaseException) -> None:
        """The row ends with what was raised."""
        self.fault, self.done = fault, True
