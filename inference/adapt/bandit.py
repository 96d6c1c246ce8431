"""Which of several ways to draft is the fastest here, and what finding out may cost.

Every way is known by what its steps gave and took. The best one is taken; the others are tried now
and then, and what a trial is expected to lose is paid in seconds, out of an allowance that grows by
a small share of all seconds. A way that is nearly as good is so tried often, a bad one rarely.
"""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 0.01  # of all seconds, that trials may lose
_MOST_SAVED = 12  # plain steps that an allowance holds at most
_MEMORY = 200.0  # steps after which one counts a third of a new one
_KEPT, _KEPT_UNTRIED = 1.0 - 1.0 / _MEMORY, 1.0 - 0.1 / _MEMORY  # what is known, step by step
_KNOWN = 40.0  # steps from which on a way is tried no more than it is forgotten


class Allowance:
    """Seconds that may be lost on trials.

    Args:
        step: seconds of a plain step.
        saved: how many of them are there to begin with.
        share: of all seconds, that trials may lose.
    """

    def __init__(self, step: float, saved: float = 3.0, share: float = SHARE) -> None:
        self._left, self._most, self._share = saved * step, _MOST_SAVED * step, share

    def grow(self, seconds: float) -> None:
        """So much time has passed."""
        self._left = min(self._left + self._share * seconds, self._most)

    def owe(self, seconds: float) -> None:
        """So much is lost whatever is left: later trials wait for what is ever saved of it."""
        self._left = max(self._left - max(seconds, 0.0), -self._most)

    def pay(self, seconds: float) -> bool:
        """Whether a trial that is expected to lose so much can be paid for; then it is."""
        if enough := seconds <= self._left:
            self.owe(seconds)
        return enough


class Bandit:
    """Ways to draft, and what each step of them gave and took.

    Args:
        priors: for each way, the tokens a row and the seconds that a step is expected to give and
            to take.
        allowance: pays for the trials.
        weight: steps for which a prior counts.
        idle: whether the first way is to do nothing. What that gives is known without a trial.

    Attributes:
        columns: what is known, as `Lessons` keeps it.
    """

    def __init__(
        self,
        priors: Sequence[tuple[float, float]],
        allowance: Allowance,
        *,
        weight: float = 2.0,
        idle: bool = False,
    ) -> None:
        tokens, seconds = ([weight * prior for prior in of] for of in zip(*priors, strict=True))
        self._steps = [weight] * len(priors)
        self.columns = tokens, self._steps, seconds
        self._allowance, self._tried = allowance, range(idle, len(priors))

    def pick(self, worth: float, prices: Sequence[float] = (), steps: float = 1.0) -> int:
        """The way of the next step.

        Args:
            worth: tokens a row that a second is worth.
            prices: seconds that each way costs besides, if it is taken now.
            steps: for how many steps a price is paid. A trial pays all of it.
        """
        values = self.values(worth)
        for way, price in enumerate(prices):
            values[way] -= worth * price / steps
        best = max(range(len(values)), key=values.__getitem__)
        least = min(self._tried, key=self._steps.__getitem__)
        rare = self._steps[least] < min(self._steps[best], _KNOWN)
        price = prices[least] * (1.0 - 1.0 / steps) if prices else 0.0
        if rare and self._allowance.pay((values[best] - values[least]) / worth + price):
            return least
        return best

    def take(self, way: int, worth: float) -> None:
        """Take this way, whatever it is expected to lose."""
        values = self.values(worth)
        self._allowance.owe((max(values) - values[way]) / worth)

    def values(self, worth: float) -> list[float]:
        """Of each way: the tokens that a step gives, less what its seconds are worth."""
        return [
            (tokens - worth * seconds) / steps
            for tokens, steps, seconds in zip(*self.columns, strict=True)
        ]

    def learn(self, way: int, tokens: float, seconds: float) -> None:
        """A step gave each row so many tokens, and took so long."""
        for column, new in zip(self.columns, (tokens, 1.0, seconds), strict=True):
            for other, known in enumerate(column):  # what is not tried is forgotten more slowly
                column[other] = _KEPT * known + new if other == way else _KEPT_UNTRIED * known
