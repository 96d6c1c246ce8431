"""What pays for rows that are decoded together, and what is known of one step of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from medusa_heads.inference.adapt.bandit import SHARE, Allowance, Bandit
from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.lessons import Columns
from medusa_heads.trees.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from medusa_heads.inference.drafters.growing import Proposal, Source
    from medusa_heads.inference.engine.rows import Row

# Accepted tokens that are expected without a source: from each bound on it is another situation.
BOUNDS = (0.3, 0.9, 2.2)
_TYPICAL = (0.1, 0.6, 1.4, 4.0)
# What a row's second token counts beside its first, in a batch: who is furthest behind ends it, and
# who runs ahead waits.
FURTHER = 0.7
_LOG_FURTHER = math.log(FURTHER)
_DRAWN = 0.7  # of what is expected of a source, where the target's tokens are drawn
_BESIDE = 0.2  # of what drafting takes for one row, what it takes for each further one


class Pace(NamedTuple):
    """How far a batch comes: see Situation.progress."""

    own: float  # the part of every step that a row saves which ends
    behind_B: list[float]  # how much each row counts for who is the last; in all, `total`
    total: float

    def of(self, more_B: Sequence[float], left_B: Sequence[float]) -> float:
        """In tokens of each row."""
        last = math.log(sum(map(mul, self.behind_B, left_B)) / self.total) / _LOG_FURTHER
        return self.own * (sum(more_B) / len(more_B)) + (1.0 - self.own) * last

    def bound(
        self, more_B: Sequence[float], left_B: Sequence[float], next_B: Sequence[float]
    ) -> Callable[[int], float]:
        """No more than what comes of so many more nodes in each row's tree, none of which is
        likelier than the next one."""
        mean, likely = sum(more_B) / len(more_B), sum(next_B) / len(more_B)
        left = sum(map(mul, self.behind_B, left_B)) / self.total
        known = sum(map(mul, self.behind_B, more_B)) / self.total
        gain = sum(map(mul, self.behind_B, next_B)) / self.total

        def most(nodes: int) -> float:
            # Not even the mean over all ways to go on comes as far as what is expected of each.
            last, still = known + nodes * gain, left - (1.0 - FURTHER) * nodes * gain
            if still > 0.0:
                last = min(last, math.log(still) / _LOG_FURTHER)
            return self.own * (mean + nodes * likely) + (1.0 - self.own) * last

        return most


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
        self._clock, self.group, self.rows, self._stay = clock, group, rows, padded
        self.graphs = list(sizes) if padded else []
        # Several of them: half as much each.
        self.allowance = Allowance(clock.step(rows), share=SHARE / 2)
        self.sizing = Allowance(clock.step(rows), 1.0, SHARE / 2)  # of trials of sizes
        # Where more is expected of the text, a second is worth more; such passages last.
        self.budgets = [Budget(clock, sizes, rows, padded=padded) for _ in _TYPICAL]
        # Not at the text, and at it.
        self.looking = Bandit([(0.0, 0.0), (0.5, 0.0)], self.allowance, idle=True)
        # Each source pays for its own trials: a dear one would leave nothing to a cheap one.
        self.allowances = [Allowance(clock.step(rows), 1.0, SHARE / 2) for _ in sources]
        self.gains = [
            [self._first(source, known, drawn, own) for known in _TYPICAL]
            for source, own in zip(sources, self.allowances, strict=True)
        ]

    def move_to(self, rows: int, again: int = 0) -> None:
        """So many rows are left, and so many tokens are read again in front of their trees."""
        self.rows = rows
        for budget in self.budgets:
            budget.rows, budget.again = rows, again

    def learning(self) -> Iterator[tuple[str, Columns]]:
        """Everything in it that learns, by names that stay."""
        yield "looking", self.looking.columns
        for known, budget in enumerate(self.budgets):
            yield f"worth {known}", budget.columns
        for source, gains in enumerate(self.gains):
            for known, gain in enumerate(gains):
                yield f"gains {source} {known}", gain.columns

    def progress(
        self, written_B: Sequence[float], more_BX: np.ndarray, left_BX: np.ndarray
    ) -> list[float]:
        """How far a batch comes, in tokens of each row.

        A row that ends saves its own part of every step, unless it stays until all have ended. The
        last one saves all the rest, so that it counts how far those come who are furthest behind: a
        mean that is soft, as nobody knows which one will be the last.

        Args:
            written_B: tokens of each row so far; endless of one that has ended.
            more_BX: that come, in each of several cases.
            left_BX: `FURTHER` to the power of that, or the expectation of it.
        """
        pace = self.pace(written_B)
        cases = zip(np.asarray(more_BX).T.tolist(), np.asarray(left_BX).T.tolist(), strict=True)
        return [pace.of(more_B, left_B) for more_B, left_B in cases]

    def pace(self, written_B: Sequence[float]) -> Pace:
        """What decides that, of rows with so many tokens."""
        step, half = self._clock.step(self.rows), self._clock.step(-(-self.rows // 2))
        own = 0.0 if self._stay else min(max(2.0 - 2.0 * half / step, 0.0), 1.0)
        fewest = min(written_B)
        behind_B = [FURTHER ** (written - fewest) for written in written_B]
        return Pace(own, behind_B, sum(behind_B))

    def grow(self, seconds: float) -> None:
        """So much time has passed."""
        for allowance in (self.allowance, self.sizing, *self.allowances):
            allowance.grow(seconds)

    def drafting(self, source: Source) -> float:
        """Seconds that a source is expected to take for so many rows; 0 where none was timed."""
        return self._clock.drafting(source.name) * (1 + _BESIDE * (self.group - 1))

    def _first(self, source: Source, known: float, drawn: bool, allowance: Allowance) -> Bandit:
        """Whether to ask a source where so many tokens are known without it, before any of it was
        seen: the two ways are not to, and to."""
        drafting, budget = self.drafting(source), self.budgets[0]
        worth = budget.worth * (1.0 + known)
        # What both know is mostly the same; and nothing of it need be verified.
        sizes = np.array([source.expected(size) for size in budget.sizes])
        more_1X = np.maximum(sizes - 0.7 * known, 0.2 * sizes)[None] * (_DRAWN if drawn else 1.0)
        if self.rows > 1:  # as if each further token were as likely as the first
            more_1X[0] = self.progress([0], more_1X, 1 / (1 + (1 - FURTHER) * more_1X))
        gains = [
            (gain, budget.seconds(size) - budget.seconds(0) + drafting)
            for gain, size in zip(more_1X[0].tolist(), budget.sizes, strict=True)
        ]
        gains.append((0.0, drafting))
        best = max(gains, key=lambda gain: gain[0] - worth * gain[1])
        return Bandit([(0.0, 0.0), best], allowance, idle=True)


class Draft(NamedTuple):
    """What is known before another source is asked."""

    trees: Sequence[PrefixTree] = ()  # of every row; none where nothing was offered
    expected: float = 0.0  # accepted tokens of a mean row, as far as they count in a batch
    size: int = 0  # so many nodes of each row are verified

    def accepted(self, committed: Sequence[Sequence[int]]) -> list[int]:
        """Accepted tokens of each row, had this been verified, of those that were committed."""
        each = zip(self.trees or [PrefixTree(-1)] * len(committed), committed, strict=True)
        return [tree.accepted(tokens, self.size) for tree, tokens in each]


class Trial(NamedTuple):
    """A source that was asked, and what was known before and behind. What it gained is what the
    text comes to say of both: each draft promises too much in its own way, so that the difference
    of two promises says little."""

    gains: Bandit
    before: Draft
    behind: Draft
    seconds: float


@dataclass
class Step:
    """A step that was drafted for; times are in seconds."""

    situation: Situation  # of its rows
    budget: Budget  # by what was expected of the text
    asked: list[Source]
    trials: list[Trial]  # what is learnt of them
    rows: list[Row]
    # Tokens of each by then; endless of those that had ended, which commit nothing.
    written: list[float]
    context: int  # the length of the longest by then
    offered: list[list[Proposal]]  # by the sources, for each row
    expected: float  # tokens of a mean row to be accepted, as far as they count
    verified: int  # tokens of all rows, roots, spare nodes and what was read again included
    drafting: float
    observing: float = 0.0  # by sources, of the target's answers
    verifying: float | None = None  # all the rest; None where nobody measured it
