"""What decoding taught, kept on disk for the processes that come later: counts, never a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from medusa_heads.machine.measurements import AGE, Measurements, measurement_folder

_KIND = "lessons"
_MOST = 40.0  # what all of the past counts for at most: new text soon outweighs it
_EVERY = 1024  # steps after which a process that lives on writes

# What is learnt, by group: what came of it, the count that it came from, and the seconds it took
# where it took any. Whoever learns changes these lists in place.
Columns = Sequence[list[float]]


class Lessons:
    """The columns of all that learns in one drafter. They begin where the last process ended.

    Seconds are kept as multiples of a plain step: a busy machine teaches the same as an idle one.

    Args:
        facts: what the lessons are of, besides the machine: the target, and who drafts.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._store, self._facts = Measurements(measurement_folder()), facts
        self._before = self._store.read(_KIND, facts) or {}
        self._learning: dict[str, tuple[Columns, list[float], Callable[[], float]]] = {}
        self._steps = 0

    def go_on(self, name: str, columns: Columns, step: Callable[[], float] = lambda: 1.0) -> None:
        """Begin these columns with what was kept under the name, if that is sound, and keep them.

        Args:
            step: gives the seconds of a plain step.
        """
        kept: Any = self._before.get(name)
        if _sound(kept, columns):
            shares = [min(_MOST / weight, 1.0) for weight in kept[1]]
            for own, before, unit in zip(columns, kept, (1.0, 1.0, step()), strict=False):
                own[:] = [unit * share * value for share, value in zip(shares, before, strict=True)]
        self._learning[name] = columns, list(columns[1]), step

    def count(self) -> None:
        """A step was learnt from."""
        self._steps += 1
        if self._steps >= _EVERY:
            self.write()

    def write(self) -> None:
        """Keep what has been learnt in place of what was kept of that; the rest stays."""
        if not self._steps:
            return
        self._steps, known = 0, {}
        for name, (columns, begun, step) in self._learning.items():
            if columns[1] != begun:
                known[name] = [
                    [float(f"{value / unit:.5g}") for value in column]
                    for column, unit in zip(columns, (1.0, 1.0, step()), strict=False)
                ]
                begun[:] = columns[1]
        self._store.write(_KIND, self._facts, (self._store.read(_KIND, self._facts) or {}) | known)


def _sound(kept: Any, columns: Columns) -> bool:
    """Whether these columns could have been what was kept; damaged, it is learnt anew."""
    lists = kept if isinstance(kept, list) and all(isinstance(each, list) for each in kept) else []
    return (
        [len(each) for each in lists] == [len(column) for column in columns]
        and all(isinstance(value, float) and abs(value) <= AGE for each in lists for value in each)
        and min(lists[1]) > 0
    )
