"""What the host reads of steps on the device.

Shapes: A = one more than the levels of a tree, N nodes of the largest one.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_heads.inference.adapt.buckets import Buckets

# Devices that work on while the host goes ahead, and whose figures are so read late.
_READ_LATE = {"cuda"}


class Figures(NamedTuple):
    """What the host reads of a step."""

    active: float  # rows that are not done
    moved: float  # rows that committed tokens
    committed: float  # their tokens
    # The most tokens that the target reads again of any row, in front of its next tree.
    again: float
    tokens: list[float]  # what the first row committed, of which there are more than it did
    # Of a mean row, the tokens accepted where its 0, 1, 2, .. likeliest nodes are verified; nothing
    # where the tree is always the same.
    expected: list[float]

    @classmethod
    def of(cls, numbers: list[float], levels: int) -> Figures:
        """As `DeviceState.figures` holds them [4 + A + N], of trees of so many levels."""
        active, moved, committed, again, *more = numbers
        return cls(active, moved, committed, again, more[: levels + 1], more[levels + 1 :])


class Reading:
    """The figures of steps, those of the last one, or on some devices of the one before it.

    Attributes:
        sizes: drafted nodes of the steps whose figures are still to be read; None of one that says
            nothing of its seconds.
        again: see Figures; None where it is not known in time.
        fresh: what was committed, where there is one row.
        seconds: from the figures before to these.
        usual_seconds: in the mean, while steps were `usual`; 0 where none was.
    """

    again: int | None = None
    seconds = usual_seconds = 0.0
    _usual, _counted = (False, False), 0  # whether the last two steps were, and how many seconds

    def __init__(self, figures: Tensor, levels: int) -> None:
        self.fresh: list[int] = []
        self._levels = levels
        self._figures, self._late = figures, figures.device.type in _READ_LATE
        self._turn, self._pinned = 0, figures.is_cuda
        self._copies = [figures.new_ones(len(figures), device="cpu") for _ in range(2)]
        if self._pinned:
            self._copies = [copy.pin_memory() for copy in self._copies]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._pinned else []
        self._read = time.perf_counter()
        self.sizes: deque[int | None] = deque()

    def begins(self, usual: bool) -> None:
        """A step, which only does again what was done before, or also makes something."""
        self._usual = self._usual[1], usual

    def goes_on(self, buckets: Buckets | None) -> bool:
        """Whether any row does, as far as is known; what is read teaches how many nodes pay."""
        figures, before = Figures.of(self._next().tolist(), self._levels), self._read
        self._read = time.perf_counter()
        self.seconds = self._read - before
        if all(self._usual):  # one is begun in that time, and one before may have ended
            self._counted += 1
            self.usual_seconds += (self.seconds - self.usual_seconds) / self._counted
        steps = self._turn - 1 - self._late  # whose figures are known
        if steps > 0 and (size := self.sizes.popleft()) is not None and figures.moved:
            assert buckets is not None
            accepted = figures.committed / figures.moved - 1.0
            buckets.learn(size, accepted, figures.expected, self.seconds)
        self.again = None if self._late else int(figures.again)
        count = int(figures.committed) if steps > 0 else 0
        self.fresh = list(map(int, figures.tokens[:count]))
        return figures.active > 0

    def _next(self) -> Tensor:
        self._turn += 1
        if not self._late:
            return self._figures
        now, before = self._turn % 2, (self._turn + 1) % 2
        self._copies[now].copy_(self._figures, non_blocking=True)
        if self._pinned:
            self._events[now].record(torch.cuda.current_stream(self._figures.device))
            if self._turn > 1:
                self._events[before].synchronize()
        return self._copies[before]
