"""Which of several ways to draft is the fastest here, and what finding out may cost.

Every way is known by what its steps gave and took. The best one is taken; the others are tried now
and then, and what a trial is expected to lose is paid in seconds, out of an allowance that grows by
a small share of all seconds. A way that is nearly as good is so tried often, a bad one rarely.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHARE = 0.01  # of all seconds, that trials may lose
_MOST_SAVED = 12  # plain steps that an allowance holds at most
_MEMORY = 200.0  # steps after which one counts a third of a new one
_KEPT = 1.0 - 1.0 / _MEMORY
_KNOWN = 40.0  # steps from which on a way is tried no more than it is forgotten


class Allowance:
    """Seconds that may be lost on trials.

    Args:
        step: seconds of a plain step.
        saved: how many of them are there to begin with.
    """

    def __init__(self, step: float, saved: float = 3.0) -> None:
        self._left, self._most = saved * step, _MOST_SAVED * step

    def grow(self, seconds: float) -> None:
        """So much time has passed."""
        self._left = min(self._left + _SHARE * seconds, self._most)

    def owe(self, seconds: float) -> None:
        """So much is lost whatever is left: later trials wait for it."""
        self._left -= max(seconds, 0.0)

    def pay(self, seconds: float) -> bool:
        """Whether a trial that is expected to lose so much can be paid for; then it is."""
        if seconds > self._left:
            return False
        self.owe(seconds)
        return True


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
        self._tokens = [weight * tokens for tokens, _ in priors]
        self._seconds = [weight * seconds for _, seconds in priors]
        self._steps = [weight] * len(priors)
        self.columns = self._tokens, self._steps, self._seconds
        self._allowance, self._tried = allowance, range(idle, len(priors))

    def pick(self, worth: float, prices: Sequence[float] | None = None, steps: float = 1.0) -> int:
        """The way of the next step.

        Args:
            worth: tokens a row that a second is worth.
            prices: seconds that each way costs besides, if it is taken now.
            steps: for how many steps a price is paid. A trial pays all of it.
        """
        values = self.values(worth)
        if prices is not None:
            values = [
                value - worth * price / steps for value, price in zip(values, prices, strict=True)
            ]
        best = max(range(len(values)), key=values.__getitem__)
        least = min(self._tried, key=self._steps.__getitem__)
        rare = self._steps[least] < min(self._steps[best], _KNOWN)
        price = prices[least] * (1.0 - 1.0 / steps) if prices is not None else 0.0
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
            for tokens, seconds, steps in zip(self._tokens, self._seconds, self._steps, strict=True)
        ]

    def learn(self, way: int, tokens: float, seconds: float) -> None:
        """A step gave each row so many tokens, and took so long."""
        for other in range(len(self._steps)):  # what is not tried is slowly forgotten
            if other != way:
                self._scale(other, 1.0 - 0.1 / _MEMORY)
        self._scale(way, _KEPT)
        self._tokens[way] += tokens
        self._seconds[way] += seconds
        self._steps[way] += 1.0

    def _scale(self, way: int, kept: float) -> None:
        for column in self.columns:
            column[way] *= kept
