"""How many nodes the next step verifies, where every number of them is a graph of its own: chosen
on the host by figures of earlier steps, which a GPU hands over late.

Drafts are made at every step, so that what each number would have been expected to give is known of
steps that verified fewer, too. Shapes: N nodes of the largest tree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import Evidence

_RECENT = 0.5  # of what was expected of earlier steps, that counts beside a new one
_WEIGHT = 8.0  # accepted tokens for which it counts that drafts are as good as they say
_MEMORY = 100.0  # steps after which one counts a third of a new one
_MAKING, _TIMED = 2, 2  # first steps of a number, that say nothing of its seconds, and that do
_RETURN = 0.02  # tokens a step, by which a number that is not taken comes to be believed again


class Buckets:
    """The number of drafted nodes of each step, of a few.

    All of them are taken four times before any is chosen. A first step makes the graph, and on a
    GPU a second one records it; the others are timed, and the quicker counts: whatever else runs on
    a machine only ever adds to a time.

    Args:
        sizes: the numbers.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sorted(set(sizes))
        self._trials = self._sizes * (_MAKING + _TIMED)
        self._seconds: dict[int, list[float]] = {size: [] for size in self._sizes}
        self._evidence = Evidence([1.0] * len(self._sizes), weight=_WEIGHT, memory=_MEMORY)
        self._expected = [0.0] * len(self._sizes)
        self._believed: dict[int, float] = dict.fromkeys(self._sizes, 0.0)  # accepted tokens
        self._clock: Clock | None = None
        self._budget: Budget | None = None

    def next(self) -> int:
        """Drafted nodes of the next step."""
        if self._budget is None:
            # A text may have ended before the last trials were read, or begun.
            self._trials = self._trials or [n for n in self._sizes if not self._timed(n)]
            return self._trials.pop()
        return self._budget.best(self._believed, self._sizes[-1])[0]

    def learn(self, size: int, accepted: float, expected: Sequence[float], seconds: float) -> None:
        """A step with so many drafted nodes has ended.

        Args:
            accepted: tokens of a mean row.
            expected: of a mean row, had 0, 1, 2, .. of its likeliest nodes been verified.
            seconds: that it took, drafting included.
        """
        drafts = []
        for group, other in enumerate(self._sizes):
            known, new = self._expected[group], min(expected[other], float(other))
            self._expected[group] = new + _RECENT * (known - new)
            drafts.append((group, accepted, new) if other == size else (group, _RETURN, _RETURN))
        self._evidence.learn_all(drafts)
        for group, other in enumerate(self._sizes):
            self._believed[other] = self._evidence.rate(group) * self._expected[group]
        if self._clock is not None and self._budget is not None:
            self._clock.learn(size + 1, seconds)
            self._budget.learn(1.0 + self._believed[size], seconds)
            return
        self._seconds[size].append(seconds)
        if all(map(self._timed, self._sizes)):
            quickest = {n + 1: min(taken[_MAKING:]) for n, taken in self._seconds.items()}
            self._clock = Clock(quickest)
            self._budget = Budget(self._clock, self._sizes, padded=True)

    def _timed(self, size: int) -> bool:
        return len(self._seconds[size]) >= _MAKING + _TIMED


class Paced:
    """Chooses by Buckets where the host goes from step to step: each is timed from its drafts to
    the next one's, and counts if it is said to be `usual`."""

    usual = False  # whether nothing was made in the last step, and nothing left out
    expected_N: Tensor | None = None  # see Buckets.learn; of the last step's drafts
    _last: Buckets | None = None  # which chose the last step's size
    _size, _began = 0, 0.0

    def next(self, buckets: Buckets, accepted: float) -> int:
        """Drafted nodes of a step that begins, by what was accepted in the last one."""
        now = time.perf_counter()
        if self.usual and self._last is not None and self.expected_N is not None:
            self._last.learn(self._size, accepted, self.expected_N.tolist(), now - self._began)
        self._last, self._size, self._began, self.usual = buckets, buckets.next(), now, False
        return self._size
