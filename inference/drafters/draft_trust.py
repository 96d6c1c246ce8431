"""How far a draft model can be believed here, and so how long its drafts should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from medusa_heads.inference.drafters.draft_value import DraftValue

if TYPE_CHECKING:
    from medusa_heads.inference.draft_costs import DraftCosts

_LEVELS = 12  # of how sure the draft model is of a token
_PRIOR_WEIGHT = 4.0
_FORGET = 0.99  # what was seen a hundred drafts ago counts little
_REMEMBER = 0.995  # how sure the draft model is changes less
_EVERY = 16  # steps from one reckoning of what drafts are worth to the next
_LONGEST_REST = 64
_SECOND_THOUGHT = 32  # of so many tokens that do not seem to pay one is tried


class DraftTrust:
    """What drafts have gained, and what the next token of one can be expected to.

    Args:
        costs: seconds of a step's parts.
    """

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        # By how sure the draft model is: accepted, tried behind an accepted one, and read at all.
        self._hits = [_PRIOR_WEIGHT * (level + 0.5) / _LEVELS for level in range(_LEVELS)]
        self._trials = [_PRIOR_WEIGHT] * _LEVELS
        self._read = [1.0] * _LEVELS
        # What steps gave and took of late; at first those of plain decoding.
        self._tokens = _PRIOR_WEIGHT
        self._seconds = _PRIOR_WEIGHT * costs.verification[0]
        self._rest = self._resting = self._declined = self._steps = 0
        self._value: DraftValue

    def chance(self, sureness: float) -> float:
        """That a token is accepted behind an accepted one, where the draft model gives its
        likeliest token so much probability. That it does is remembered."""
        level = _level(sureness)
        self._read = [_REMEMBER * count for count in self._read]
        self._read[level] += 1
        return self._hits[level] / self._trials[level]

    def worth_reading(self, depth: int, chance: float) -> bool:
        """Whether a forward of the draft model pays behind `depth` drafted tokens.

        Args:
            depth: tokens drafted so far; 0 begins a step.
            chance: that all of them are accepted.
        """
        if not depth:
            self._reckon()
        if self._value.of_reading(depth, chance) > 0:
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
        if self._value.of_verifying(depth, chance) > 0:
            return True
        self._declined += 1
        return self._declined % _SECOND_THOUGHT == 0

    def learn(
        self, tokens: Sequence[int], sureness: Sequence[float], committed: Sequence[int]
    ) -> None:
        """Compare a drafted chain with what the target wrote."""
        for drafted, sure, true in zip(tokens, sureness, committed, strict=False):
            level, hit = _level(sure), float(drafted == true)
            self._trials[level] = _FORGET * self._trials[level] + 1
            self._hits[level] = _FORGET * self._hits[level] + hit
            if not hit:
                return

    def learn_step(self, tokens: float, seconds: float) -> None:
        """What a step gave each row, and what it took by the measured costs."""
        self._tokens = _FORGET * self._tokens + tokens
        self._seconds = _FORGET * self._seconds + seconds
        if tokens / seconds > 1 / self._costs.verification[0]:
            # After a trial that paid, the next one comes at once: texts have easier passages.
            self._rest = self._resting = 0

    def _reckon(self) -> None:
        """Now and then, what drafts are worth by all that was learnt; at first more often."""
        if self._steps % _EVERY == 0 or self._steps.bit_count() == 1:
            # Plain decoding is always to be had.
            worth = max(self._tokens / self._seconds, 1 / self._costs.verification[0])
            chances = [hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)]
            self._value = DraftValue(self._costs, worth, self._read, chances)
        self._steps += 1


def _level(sureness: float) -> int:
    return min(int(sureness * _LEVELS), _LEVELS - 1)
