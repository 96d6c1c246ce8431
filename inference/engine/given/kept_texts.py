"""Texts that have ended: what the target has read of them, for prompts that begin alike.

The next turn of a conversation begins with all that was said before, and many prompts with the same
instructions: their keys and values are there already. They are kept of targets whose rows stay as
they are whatever follows: not of recurrent states, nor of positions that go by a text's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from medusa_heads.inference.engine.rows import Row
from medusa_heads.target.cache import RowCache
from medusa_heads.target.positions import position_rule
from medusa_heads.target.target import TargetModel

_LEAST = 16  # tokens: fewer are read as soon as they are copied
_MOST = 256  # texts, each of which is compared with every prompt


@dataclass(frozen=True, eq=False)
class _Text:
    """Token ids [T], and the rows that the target made of them: as many."""

    ids_T: np.ndarray
    cache: RowCache


class KeptTexts:
    """As many as fit. The one that no prompt has begun with for longest goes first.

    Args:
        target: that reads them.
        slot_bytes: what a token takes.
        most_bytes: what all may take; 0: none is kept.
    """

    def __init__(self, target: TargetModel, slot_bytes: int, most_bytes: int) -> None:
        self._target, self._slot_bytes, self._most_bytes = target, slot_bytes, most_bytes
        self._texts: list[_Text] = []  # the latest last
        rule, cache = position_rule(target.model), target.new_cache()
        self._serves = type(cache) is RowCache and not cache.keeps_index
        self._serves &= rule is None or rule.beyond == "none"

    @property
    def held_bytes(self) -> int:
        """What they take now."""
        return sum(text.cache.held_bytes for text in self._texts)

    def keep(self, row: Row, cache: RowCache, place: int, length: int) -> None:
        """Copy so many slots of a row that ends, which has this place in its batch."""
        needed = length * self._slot_bytes
        if not self._serves or length < _LEAST or needed > self._most_bytes:
            return
        ids_T = row.ids_1T()[0, :length].cpu().numpy()
        # One that this text goes on from is no longer needed, nor is this where another does.
        common = {text: _in_common(text.ids_T, ids_T) for text in self._texts}
        self._texts = [text for text in self._texts if common[text] < len(text.ids_T)]
        if longer := [text for text in self._texts if common[text] == length]:
            self._use(longer[0])
            return
        while self._texts and (
            self.held_bytes + needed > self._most_bytes or len(self._texts) >= _MOST
        ):
            del self._texts[0]
        if (copied := self._copy(cache, place, length, length)) is not None:
            self._texts.append(_Text(ids_T, copied))

    def begin(self, ids: Sequence[int], slots: int) -> RowCache | None:
        """A cache of what the target need not read of a prompt, with room for so many slots; the
        last token is always read. None where there is too little."""
        ids_T = np.asarray(ids[:-1])
        common = {text: _in_common(text.ids_T, ids_T) for text in self._texts}
        if max(common.values(), default=0) < _LEAST:
            return None
        text = max(reversed(self._texts), key=common.__getitem__)
        self._use(text)
        return self._copy(text.cache, 0, common[text], slots)

    def _use(self, text: _Text) -> None:
        self._texts.remove(text)
        self._texts.append(text)

    def _copy(self, cache: RowCache, place: int, length: int, slots: int) -> RowCache | None:
        """None where there is no memory for it, and no text is kept any more."""
        made = self._target.new_cache(1, slots)
        try:
            for mine, theirs in zip(made.row_layers, cache.row_layers, strict=True):
                if not theirs.is_initialized:  # it reads images, of which there are none
                    continue
                once = len(theirs.members()) == 1  # keys that are the values too
                keys, values = (of[place : place + 1, :, :length] for of in theirs.buffers())
                mine.update(keys, keys if once else values)
        except torch.OutOfMemoryError:
            self._texts.clear()
            return None
        return made


def _in_common(one_T: np.ndarray, other_T: np.ndarray) -> int:
    """How many tokens two texts begin with alike."""
    shorter = min(len(one_T), len(other_T))
    differs_T = one_T[:shorter] != other_T[:shorter]
    return int(differs_T.argmax()) if differs_T.any() else shorter
