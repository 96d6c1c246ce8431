"""Every outcome of what is drawn, one after the other, with its probability."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Outcomes:
    """Stands in for torch's dice: each run takes the next path through all that may be drawn."""

    def __init__(self) -> None:
        self._ahead: list[list[int]] = [[]]
        self._taken: list[int] = []
        self._step = 0
        self.chance = 1.0

    def runs(self) -> Iterator[None]:
        """Once for each outcome; `chance` is its probability afterwards."""
        while self._ahead:
            self._taken, self._step, self.chance = self._ahead.pop(), 0, 1.0
            yield

    def choose(self, chances: Sequence[float]) -> int:
        """One of the possibilities; the others are left for later runs."""
        if self._step == len(self._taken):
            first, *others = [i for i, chance in enumerate(chances) if chance > 0]
            self._ahead += [[*self._taken, other] for other in others]
            self._taken = [*self._taken, first]
        choice = self._taken[self._step]
        self._step += 1
        self.chance *= chances[choice]
        return choice
