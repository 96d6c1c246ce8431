"""Whether a draft model drafts for the next step, and which of several."""

from __future__ import annotations

from collections.abc import Sequence

from medusa_heads.inference.adapt.bandit import Allowance, Bandit
from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock

_PRIOR = 6.0  # steps for which what was expected of a way counts
_AHEAD = 64.0  # tokens that a text is expected to go on for, at the least


class DraftChoice:
    """What drafts gave and took, and so who drafts next.

    What is remembered is kept apart for steps behind a draft that paid and for those behind one
    that did not: texts have easier passages.

    Args:
        clock: seconds of the target's steps.
        most: drafted nodes of each of the rows.
        priors: tokens a row and seconds that a step is expected to give and to take, with each
            draft model.
        rests: whether there may be a step without a draft. That is way 0 then.

    Attributes:
        budget, allowance: what a second is worth, and what pays for trials.
    """

    def __init__(
        self,
        clock: Clock,
        most: int,
        rows: int,
        priors: Sequence[tuple[float, float]],
        *,
        rests: bool = True,
    ) -> None:
        self.allowance = Allowance(clock.step(rows))
        self.budget = Budget(clock, range(most + 1), rows)
        self._rests = rests
        plain = clock.step(rows)
        ways = [(tokens - 1.0, seconds - plain) for tokens, seconds in priors]
        ways = [(0.0, 0.0), *ways] if rests else ways
        self._bandits = {
            paid: Bandit(ways, self.allowance, weight=_PRIOR, idle=rests) for paid in (True, False)
        }
        self._paid = self._paid_before = True
        self._way = 0

    def pick(self, prices: Sequence[float], written: float) -> int:
        """The way of the next step; `prices` are the seconds in which each draft model reads what
        it has missed, and so many tokens as were written may come."""
        self._paid_before, bandit = self._paid, self._bandits[self._paid]
        self._way = bandit.pick(self.budget.worth, prices, max(written, _AHEAD))
        return self._way

    def learn(self, tokens: float, seconds: float) -> None:
        """What the step gave each row, and took, apart from reading what was missed."""
        plain = self.budget.seconds(0)
        self.allowance.grow(seconds)
        self.budget.learn(tokens, seconds)
        rested = self._rests and not self._way
        gained = (0.0, 0.0) if rested else (tokens - 1.0, seconds - plain)
        self._bandits[self._paid_before].learn(self._way, *gained)
        if not rested:
            self._paid = tokens * plain > seconds
