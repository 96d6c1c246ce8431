"""Rows of a corpus that cannot be used: counted, named by place, never dropped in silence."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

logger = logging.getLogger(__name__)

_NAMED = 5  # so many broken rows are named; the others are counted


class BadRow(ValueError):
    """One row cannot be used; the message says why, as a part of a sentence."""


@dataclass
class BadRows:
    """The tally of a corpus. By policy `"error"` a table's rows stop the run when all are read, and
    a stream's at the first; by `"skip"` they are left out, with a warning."""

    policy: Literal["error", "skip"] = "error"
    stream: bool = False
    count: int = 0
    examples: list[str] = field(default_factory=list)
    _places: set[str] = field(default_factory=set)
    _told: int = 0

    def __deepcopy__(self, memo: object) -> BadRows:
        return self  # datasets copies what its streams read with, and there is one tally

    def add(self, place: str, reason: str) -> None:
        """Count a row that stands at `place` (`file:line`), once however often it is read."""
        if place in self._places:
            return
        self._places.add(place)
        self.count += 1
        if self.count <= _NAMED:
            self.examples.append(f"{place}: {reason}")
        if self.stream and self.policy == "error":
            self._places.clear()  # a stream read again stops again
            self.settle()
        elif self.stream and self.count <= _NAMED:
            last = "; further ones are only counted" * (self.count == _NAMED)
            logger.warning("left out a broken row: %s%s", self.examples[-1], last)

    @property
    def named(self) -> str:
        """The first ones, and how many more there are."""
        unnamed = self.count - len(self.examples)
        return "; ".join(self.examples) + f"; and {unnamed} more" * (unnamed > 0)

    def settle(self) -> None:
        """All rows are read: go on, with a warning where rows were left out, or raise a ValueError
        that names the first."""
        rows = "1 broken row" if self.count == 1 else f"{self.count} broken rows"
        if self.count and self.policy == "error":
            raise ValueError(
                f"the corpus has {rows} ({self.named}): mend them, or leave them out with "
                "on_bad_row 'skip'"
            )
        if self.count > self._told:  # a later stage may find none beyond those known
            logger.warning("left out %s: %s", rows, self.named)
            self._told = self.count
