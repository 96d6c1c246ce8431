"""How many nodes the next step verifies, where every number of them is a graph of its own: chosen
on the host by figures of earlier steps, which a GPU hands over late.

Drafts are made at every step, so that what each number would have been expected to give is known of
steps that verified fewer, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import Evidence

_RECENT = 0.5  # of what was expected of earlier steps, that counts beside a new one
_WEIGHT = 8.0  # accepted tokens for which it counts that drafts are as good as they say
_MEMORY = 100.0  # steps after which one counts a third of a new one
_RETURN = 0.02  # tokens a step, by which a number that is not taken comes to be believed again


class Buckets:
    """The number of drafted nodes of each step, of a few.

    All of them are taken twice before any is chosen: a first step makes its graph, and the second
    one is timed.

    Args:
        sizes: the numbers.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sorted(set(sizes))
        self._groups = {size: group for group, size in enumerate(self._sizes)}
        self._trials = [*self._sizes, *self._sizes]
        self._made: set[int] = set()
        self._seconds: dict[int, float] = {}
        self._evidence = Evidence([1.0] * len(self._sizes), weight=_WEIGHT, memory=_MEMORY)
        self._expected = [0.0] * len(self._sizes)
        self._clock: Clock | None = None
        self._budget: Budget | None = None

    def next(self) -> int:
        """Drafted nodes of the next step."""
        if self._budget is None:
            # A text may have ended before the last trials were read, or begun.
            self._trials = self._trials or [n for n in self._sizes if n not in self._seconds]
            return self._trials.pop()
        believed = dict(zip(self._sizes, self._believed(), strict=True))
        return self._budget.best(believed, self._sizes[-1])[0]

    def learn(self, size: int, accepted: float, expected: Sequence[float], seconds: float) -> None:
        """A step with so many drafted nodes has ended.

        Args:
            accepted: tokens of a mean row.
            expected: of a mean row, had 0, 1, 2, .. of its likeliest nodes been verified.
            seconds: that it took, drafting included.
        """
        for group, other in enumerate(self._sizes):
            known, new = self._expected[group], min(expected[other], float(other))
            self._expected[group] = new + _RECENT * (known - new)
            if other == size:
                self._evidence.learn(group, accepted, new)
            else:
                self._evidence.learn(group, _RETURN, _RETURN)
        if self._clock is not None and self._budget is not None:
            self._clock.learn(size + 1, seconds)
            self._budget.learn(1.0 + self._believed()[self._groups[size]], seconds)
        elif size in self._made:
            self._seconds.setdefault(size, seconds)
            if len(self._seconds) == len(self._sizes):
                self._clock = Clock({size + 1: taken for size, taken in self._seconds.items()})
                self._budget = Budget(self._clock, self._sizes, padded=True)
        self._made.add(size)

    def _believed(self) -> list[float]:
        """Accepted tokens by size."""
        return [
            self._evidence.rate(group) * expected for group, expected in enumerate(self._expected)
        ]
