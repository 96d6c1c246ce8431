"""What pays for rows that are decoded together, and what is known of one step of theirs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from medusa_heads.inference.adapt.bandit import Allowance, Bandit
from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import Evidence
from medusa_heads.inference.adapt.lessons import Columns

if TYPE_CHECKING:
    from medusa_heads.inference.drafters.growing import Proposal, Source
    from medusa_heads.inference.engine.rows import Row

# Accepted tokens that are expected without a source: from each bound on it is another situation.
BOUNDS = (0.3, 0.9, 2.2)
_TYPICAL = (0.1, 0.6, 1.4, 4.0)
_AHEAD = 0.13  # of a token's worth, what it loses in a batch each time that the rows double
_DRAWN = 0.7  # of what is expected of a source, where the target's tokens are drawn
_BESIDE = 0.2  # of what drafting takes for one row, what it takes for each further one


class Situation:
    """Rows decoded together, drawn or not: what pays for them.

    Args:
        clock, sizes, sources, padded: see BlendedDrafter.
        group: so many rows or fewer, but more than half as many.
        rows: how many they are now.
        drawn: whether the target's tokens are drawn.
    """

    def __init__(
        self,
        clock: Clock,
        sizes: Sequence[int],
        group: int,
        rows: int,
        sources: Sequence[Source],
        *,
        drawn: bool = False,
        padded: bool = False,
    ) -> None:
        self.group, self.rows = group, rows
        self.graphs = list(sizes) if padded else []
        self.allowance = Allowance(clock.step(rows))
        # Where more is expected of the text, a second is worth more; such passages last.
        self.budgets = [Budget(clock, sizes, rows, self.allowance, padded=padded) for _ in _TYPICAL]
        # Several sources may contradict each other, and together expect too much.
        usual = _DRAWN if drawn else 1.0
        self._by_place = Evidence([usual] * len(_TYPICAL), weight=12.0, memory=300.0)
        self._by_sources = Evidence([1.0] * (1 << len(sources)), weight=60.0, memory=1000.0)
        self.looking = Bandit(
            [(0.0, 0.0), (0.5, 0.0)], self.allowance
        )  # not at the text, and at it
        # Each source pays for its own trials: a dear one would leave nothing to a cheap one.
        self.allowances = [Allowance(clock.step(rows), 1.0) for _ in sources]
        self.gains = [
            [self._first(clock, source, known, drawn, own) for known in _TYPICAL]
            for source, own in zip(sources, self.allowances, strict=True)
        ]

    def move_to(self, rows: int, again: int = 0) -> None:
        """So many rows are left, and so many tokens are read again in front of their trees."""
        self.rows = rows
        for budget in self.budgets:
            budget.rows, budget.again = rows, again

    def learning(self) -> Iterator[tuple[str, Columns]]:
        """Everything in it that learns, by names that stay."""
        yield "places", self._by_place.columns
        yield "sources", self._by_sources.columns
        yield "looking", self.looking.columns
        for known, budget in enumerate(self.budgets):
            yield f"worth {known}", budget.columns
        for source, gains in enumerate(self.gains):
            for known, gain in enumerate(gains):
                yield f"gains {source} {known}", gain.columns

    @property
    def share(self) -> float:
        """What a token that one row gains is worth in a batch, which ends with its last row: rows
        that run ahead gain little where fewer rows take almost as long."""
        return max(1.0 - _AHEAD * math.log2(self.rows), 0.3)

    def correction(self, place: int, asked: int) -> float:
        """Factor for what is expected of these sources together, at a place among the budgets."""
        both = self._by_place.rate(place) * self._by_sources.rate(asked)
        return min(max(both, 0.3), 1.5)

    def learn_correction(self, place: int, asked: int, accepted: float, expected: float) -> None:
        """So many tokens were accepted, and so many expected, the correction included."""
        uncorrected = expected / self.correction(place, asked)
        by_place, by_sources = self._by_place.rate(place), self._by_sources.rate(asked)
        self._by_place.learn(place, accepted, uncorrected * by_sources)
        self._by_sources.learn(asked, accepted, uncorrected * by_place)

    def grow(self, seconds: float) -> None:
        """So much time has passed."""
        for allowance in (self.allowance, *self.allowances):
            allowance.grow(seconds)

    def _first(
        self, clock: Clock, source: Source, known: float, drawn: bool, allowance: Allowance
    ) -> Bandit:
        """Whether to ask a source where so many tokens are known without it, before any of it was
        seen: the two ways are not to, and to."""
        drafting = clock.drafting(source.name) * (1 + _BESIDE * (self.group - 1))
        share, budget = self.share * (_DRAWN if drawn else 1.0), self.budgets[0]
        worth = budget.worth * (1.0 + known)
        # What both know is mostly the same; and nothing of it need be verified.
        gains = [
            (
                share * max(source.expected(size) - 0.7 * known, 0.2 * source.expected(size)),
                budget.seconds(size) - budget.seconds(0) + drafting,
            )
            for size in budget.sizes
        ]
        gains.append((0.0, drafting))
        best = max(gains, key=lambda gain: gain[0] - worth * gain[1])
        return Bandit([(0.0, 0.0), best], allowance)


@dataclass
class Step:
    """A step that was drafted for.

    Attributes:
        situation: of its rows.
        place: of what was expected of the text, among the budgets.
        asked: a bit for each source.
        rows: those that were active.
        offered: what the sources offered for each.
        expected: drafted tokens of a mean row that were expected to be accepted, as far as they
            count in a batch.
        share: how far they do.
        nodes: verified in each row, the root and spare ones included.
        again: tokens that were read again in front of them.
        drafting: seconds that it took.
        observing: seconds that sources took to look at the target's answers.
        verifying: seconds of all the rest; None where nobody measured them.
        lengths: of the rows' texts by then.
    """

    situation: Situation
    place: int
    asked: int
    rows: list[Row]
    offered: list[list[Proposal]]
    expected: float
    share: float
    nodes: int
    again: int
    drafting: float
    observing: float = 0.0
    verifying: float | None = None
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = [row.length for row in self.rows]
