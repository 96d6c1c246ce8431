"""A text of the target in the tokens of a draft model with another vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_heads.inference.drafters.model.vocabulary import SharedVocabulary
from medusa_heads.inference.engine.rows import Row


class TranslatedRow:
    """A row as the draft model reads it: shared tokens one by one, so that its texts end where the
    target's do; what stands between them by its bytes, encoded anew as it grows. Special tokens
    that the draft model does not have are left out.

    Args:
        row: the target's.
        start: tokens of padding before it.
        vocabulary: what the draft model shares with the target.

    Attributes:
        row: the target's.
        ids: the draft model's tokens.
        padding: that stands before them, in its cache.
    """

    def __init__(self, row: Row, start: int, vocabulary: SharedVocabulary) -> None:
        self.row, self._vocabulary = row, vocabulary
        self._read = start  # tokens of the target, of which `ids` is a translation
        self._open = b""  # the bytes behind the last shared token
        self._settled: list[int] = []  # what they stand behind
        self.ids: list[int] = []
        self.padding = 0
        self.read_on()
        begin = vocabulary.begin
        if begin and self.ids[:1] != begin:
            self._settled = begin + self._settled
        # The last token is read for what comes next, and something must stand before it.
        missing = max(2 - len(self._settled) - len(self.ids), 0)
        self._settled = [vocabulary.nothing] * missing + self._settled
        self.ids = self._settled + vocabulary.encode(self._open)

    @property
    def length(self) -> int:
        """Slots that the tokens take, padding included."""
        return self.padding + len(self.ids)

    def behind(self, length: int) -> list[int]:
        """The tokens from this slot on."""
        return self.ids[length - self.padding :]

    def ids_1T(self) -> Tensor:
        """The tokens so far, padding included."""
        return torch.tensor([[0] * self.padding + self.ids])

    def read_on(self) -> int:
        """Translate what was committed since; returns how many slots stay as they were. At least
        the last one never does: what comes next is asked of it."""
        before, unchanged = self.ids, len(self._settled)
        for token in self.row.ids_1T()[0, self._read :].tolist():
            own, spelled = self._vocabulary.own.get(token), self._vocabulary.spelled(token)
            if own is None and spelled:
                self._open += spelled
                continue
            self._settled += self._vocabulary.encode(self._open)
            self._open = b""
            if own is not None:
                self._settled.append(own)
        self._read = self.row.length
        self.ids = self._settled + self._vocabulary.encode(self._open)
        most = min(len(before), len(self.ids) - 1)
        while unchanged < most and before[unchanged] == self.ids[unchanged]:
            unchanged += 1
        return self.padding + max(min(unchanged, most), 0)
