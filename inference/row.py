"""One sequence of a batch: its tokens, when it ends, and who is told of them.

Shapes: T tokens, C slots of a buffer, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class StopCheck:
    """transformers' stopping criteria for one row, asked after every token.

    Length and end-of-sequence, which nearly every call has, are answered on the host; whatever else
    the user passed is called as generate() calls it, with this row alone.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self._max_length: int | None = None
        self._eos: set[int] = set()
        self._others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                limit = int(criterion.max_length)
                self._max_length = min(limit, self._max_length or limit)
            elif type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.flatten().tolist())
            else:
                self._others.append(criterion)

    def __call__(self, row: Row) -> bool:
        """Whether the row ends with its newest token."""
        if row.tokens[-1] in self._eos:
            return True
        if self._max_length is not None and row.length >= self._max_length:
            return True
        return bool(self._others) and bool(self._others(row.ids_1T(), None).all())


class ScoreRecorder:
    """Scores and logits of the committed tokens, each [1, V], as generate() returns them.

    Attributes:
        scores: after the logits processors.
        logits: as the target gave them, in fp32.
    """

    def __init__(self) -> None:
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []

    def record(self, scores_1V: Tensor, logits_1V: Tensor) -> None:
        """Note what one token was drawn from."""
        self.scores.append(scores_1V)
        self.logits.append(logits_1V)

    def given(self, name: Literal["scores", "logits"]) -> tuple[Tensor, ...]:
        """One tensor a token, to hand out: no longer inference tensors."""
        return tuple(tensor.clone() for tensor in getattr(self, name))


class Row:
    """One sequence of the batch.

    Args:
        index: its place in the batch that the user gave.
        batch_size: how many rows that batch has.
        prompt_T: its prompt, left padding included, as generate() would see it.
        stop: when it ends.
        streamer: receives every token as it is committed; if it has a method `end_step`, that is
            called after the tokens of each step.
        recorder: receives scores and logits of every token, where the user asked for them.
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
        self.index = index
        self.batch_size = batch_size
        self.tokens: list[int] = []
        self.done = False
        self.recorder = recorder
        self._stop = stop
        self._streamer = streamer
        self._prompt_length = prompt_T.shape[0]
        self._ids_1C = prompt_T[None].clone()
        self._written = self._prompt_length

    @property
    def length(self) -> int:
        """Tokens of the row so far, padding included."""
        return self._prompt_length + len(self.tokens)

    def ids_1T(self) -> Tensor:
        """The row's token ids so far, as logits processors and stopping criteria read them."""
        if self.length > self._ids_1C.shape[1]:
            room = self._ids_1C.new_zeros(1, self.length + 256)
            room[:, : self._written] = self._ids_1C[:, : self._written]
            self._ids_1C = room
        if self._written < self.length:
            fresh = self.tokens[self._written - self._prompt_length :]
            self._ids_1C[0, self._written : self.length] = torch.tensor(
                fresh, device=self._ids_1C.device
            )
            self._written = self.length
        return self._ids_1C[:, : self.length]

    def behind(self, length: int) -> list[int]:
        """The committed tokens after the row's first `length`, which hold at least the prompt."""
        assert length >= self._prompt_length
        return self.tokens[length - self._prompt_length :]

    def commit(self, token: int) -> bool:
        """Append a token of the target; whether the row ends with it."""
        assert not self.done
        self.tokens.append(token)
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        self.done = self._stop(self)
        return self.done

    def end_step(self) -> None:
        """All tokens of a step are committed."""
        if hasattr(self._streamer, "end_step"):
            self._streamer.end_step()
