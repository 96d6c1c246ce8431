"""How far a draft model can be believed here, and so how long its drafts should be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa_heads.inference.draft_costs import DraftCosts

_LEVELS = 12  # of how sure the draft model is of a token
_PRIOR_WEIGHT = 4.0
_PRIOR = 0.7  # the chance of a token of a draft model that was never tried
_FORGET = 0.99  # what was seen a hundred drafts ago counts little
_LONGEST_REST = 64
_SECOND_THOUGHT = 32  # of so many tokens that do not seem to pay one is tried


class DraftTrust:
    """What drafts have gained, and what the next token of one can be expected to.

    Args:
        costs: seconds of a step's parts.
    """

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        # Accepted, and tried behind an accepted one: by sureness, and by depth.
        self._sure_hits = [_PRIOR_WEIGHT * (level + 0.5) / _LEVELS for level in range(_LEVELS)]
        self._sure_trials = [_PRIOR_WEIGHT] * _LEVELS
        self._deep_hits = [_PRIOR_WEIGHT * _PRIOR] * costs.most
        self._deep_trials = [_PRIOR_WEIGHT] * costs.most
        # What steps gave and took of late; at first those of plain decoding.
        self._tokens = _PRIOR_WEIGHT
        self._seconds = _PRIOR_WEIGHT * costs.verification[0]
        self._rest = self._resting = self._declined = 0

    def chance(self, sureness: float) -> float:
        """That a token is accepted behind an accepted one, where the draft model gives its
        likeliest token so much probability."""
        level = _level(sureness)
        return self._sure_hits[level] / self._sure_trials[level]

    def worth_reading(self, depth: int, chance: float) -> bool:
        """Whether a forward of the draft model pays behind `depth` drafted tokens.

        Args:
            depth: tokens drafted so far.
            chance: that all of them are accepted.
        """
        forward = self._costs.further if depth else self._costs.first
        if self._gain(depth, chance, self._expected(depth)) > forward * self._worth:
            if not depth:
                self._rest = self._resting = 0
            return True
        if depth:
            return False
        # Rests of 1, 2, 4, .. steps between the trials of a draft model that does not pay.
        if self._resting < self._rest:
            self._resting += 1
            return False
        self._rest, self._resting = min(2 * self._rest + 1, _LONGEST_REST), 0
        return True

    def worth_verifying(self, depth: int, chance: float) -> bool:
        """Whether the token pays that comes behind `depth` drafted ones, now that it is known how
        sure the draft model is.

        Args:
            depth: tokens drafted so far.
            chance: that all of them and the new one are accepted.
        """
        if self._gain(depth, chance, [1.0, *self._expected(depth + 1)]) > 0:
            return True
        self._declined += 1
        return self._declined % _SECOND_THOUGHT == 0

    def learn(
        self, tokens: Sequence[int], sureness: Sequence[float], committed: Sequence[int]
    ) -> None:
        """Compare a drafted chain with what the target wrote."""
        for depth, (drafted, sure, true) in enumerate(
            zip(tokens, sureness, committed, strict=False)
        ):
            level, hit = _level(sure), float(drafted == true)
            self._sure_trials[level] = _FORGET * self._sure_trials[level] + 1
            self._sure_hits[level] = _FORGET * self._sure_hits[level] + hit
            self._deep_trials[depth] = _FORGET * self._deep_trials[depth] + 1
            self._deep_hits[depth] = _FORGET * self._deep_hits[depth] + hit
            if not hit:
                return

    def learn_step(self, tokens: float, seconds: float) -> None:
        """What a step gave each row, and what it took by the measured costs."""
        self._tokens = _FORGET * self._tokens + tokens
        self._seconds = _FORGET * self._seconds + seconds

    @property
    def _worth(self) -> float:
        """Tokens that a second is worth: plain decoding is always to be had."""
        return max(self._tokens / self._seconds, 1 / self._costs.verification[0])

    def _expected(self, depth: int) -> list[float]:
        """The chance that the next 1, 2, .. tokens are all accepted, behind `depth` that are."""
        pairs = zip(self._deep_hits[depth:], self._deep_trials[depth:], strict=True)
        rates = [hits / trials for hits, trials in pairs]
        return list(accumulate(rates, lambda chance, rate: chance * rate))

    def _gain(self, depth: int, chance: float, ahead: Sequence[float]) -> float:
        """Tokens that the best number of further ones gains, less what they cost: their
        verification, and a forward for each behind the first."""
        costs, gains, best = self._costs, 0.0, -float("inf")
        for more, further in enumerate(ahead[: costs.most - depth], start=1):
            gains += chance * further
            spent = costs.verification[depth + more] - costs.verification[depth]
            spent += (more - 1) * costs.further
            best = max(best, gains - self._worth * spent)
        return best


def _level(sureness: float) -> int:
    return min(int(sureness * _LEVELS), _LEVELS - 1)
