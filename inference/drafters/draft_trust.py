"""How far a draft model can be believed here, and so how large its drafts should be."""

from __future__ import annotations

from collections.abc import Sequence
from operator import truediv
from typing import TYPE_CHECKING

from medusa_heads.inference.drafters.draft_value import DraftValue

if TYPE_CHECKING:
    from medusa_heads.inference.draft_costs import DraftCosts

# Of a second token and those behind it, that it is accepted where the ones before it are wrong.
_PRIOR_BESIDE = (0.3, 0.2, 0.12)
MOST_RANKS = 1 + len(_PRIOR_BESIDE)  # behind a node; a fifth would be accepted in very few steps
_LEVELS = 12  # of how sure the draft model is of a token
_PRIOR_WEIGHT = 4.0
_FORGET = 0.99  # what was seen a hundred drafts ago counts little
_REMEMBER = 0.995  # how sure the draft model is changes less
_EVERY = 16  # steps from one reckoning of what drafts are worth to the next
_LONGEST_REST = 64
_SECOND_THOUGHT = 32  # of so many tokens that do not seem to pay one is tried
_LEAST_PRICE = 0.003
_DEARER = 1.4  # the price of a node where there were too few ..
_CHEAPER = 0.97  # .. and where there were enough


class DraftTrust:
    """What drafts have gained, and what the next tokens of one can be expected to.

    Args:
        costs: seconds of a step's parts.
        ranks: the most tokens behind another.
    """

    def __init__(self, costs: DraftCosts, ranks: int = 1) -> None:
        self._costs, self.ranks = costs, ranks
        # By rank and by how sure the draft model is: accepted, and tried, behind an accepted token
        # whose others are wrong.
        prior = [(level + 0.5) / _LEVELS for level in range(_LEVELS)]
        others = _PRIOR_BESIDE[: ranks - 1]
        priors = [prior, *([min(chance, other) for chance in prior] for other in others)]
        self._hits = [[_PRIOR_WEIGHT * chance for chance in of_rank] for of_rank in priors]
        self._trials = [[_PRIOR_WEIGHT] * _LEVELS for _ in priors]
        # By how sure it is of the first one: how often it is so sure, and what the others promise.
        self._read = [1.0] * _LEVELS
        self._beside = [[other * (1 - chance) for other in others] for chance in prior]
        # What steps gave and took of late; at first those of plain decoding.
        self._tokens = _PRIOR_WEIGHT
        self._seconds = _PRIOR_WEIGHT * costs.verification[0]
        self._rest = self._resting = self._declined = self._steps = 0
        # Below what chance a token takes the place of a better one that comes later.
        self._price, self._full = _LEAST_PRICE, False
        self._value: DraftValue

    def chances(self, sureness: Sequence[float], weight: float = 1.0) -> list[float]:
        """That the first, second, .. token behind an accepted one is accepted, each where those
        before it are wrong. How sure the draft model is of them is remembered.

        Args:
            sureness: of the draft model, by rank.
            weight: of this node among those that are read at once.
        """
        chances, open_ = [], 1.0
        for rank, sure in enumerate(sureness):
            level = _level(sure)
            chance = self._hits[rank][level] / self._trials[rank][level]
            chances.append(open_ * chance)
            open_ *= 1 - chance
        first = _level(sureness[0])
        kept = _REMEMBER**weight
        self._read = [kept * count for count in self._read]
        self._read[first] += weight
        beside = self._beside[first]
        for rank, chance in enumerate(chances[1:]):
            beside[rank] += 0.05 * weight * (chance - beside[rank])
        return chances

    def worth_reading(self, level: int, chance: float, *, nodes: int | None = None) -> bool:
        """Whether a forward of the draft model pays behind a draft of `level` tokens.

        Args:
            level: 0 begins a step.
            chance: that all of them are accepted.
            nodes: of the draft so far; as many as levels in a chain.
        """
        if not level:
            self._reckon()
        elif self._holds_all(level if nodes is None else nodes):
            return False
        if self._value.of_reading(level, chance) > 0:
            if not level:
                self._rest = self._resting = 0
            return True
        if level:
            return False
        # Rests of 1, 2, 4, .. steps between the trials of a draft model that does not pay.
        if self._resting < self._rest:
            self._resting += 1
            return False
        self._rest, self._resting = min(2 * self._rest + 1, _LONGEST_REST), 0
        return True

    def worth_reading_beside(self, nodes: int, chance: float) -> bool:
        """Whether a node pays in a forward of the draft model that is made for others anyway.

        Args:
            nodes: of the draft so far.
            chance: that this one is accepted.
        """
        return self._value.of_reading_beside(nodes, chance) > 0

    def worth_verifying(
        self, level: int, chance: float, *, nodes: int | None = None, promised: float = 0.0
    ) -> bool:
        """Whether the likeliest next token pays, now that it is known how sure the draft model is.

        Args:
            level: of how many tokens the draft behind which it comes is.
            chance: that all of them and the new one are accepted.
            nodes: of the draft so far; as many as levels in a chain.
            promised: the chance that another token of this level is accepted.
        """
        nodes = level if nodes is None else nodes
        if self._holds_all(nodes):
            return False
        if promised and chance < self._price:
            return False
        if self._value.of_verifying(level, nodes, promised, chance) > 0:
            return True
        self._declined += 1
        return self._declined % _SECOND_THOUGHT == 0

    def learn(self, rank: int, sureness: float, right: bool) -> None:
        """Compare with what the target wrote: a token behind an accepted one, those before it
        wrong."""
        level = _level(sureness)
        hits, trials = self._hits[rank], self._trials[rank]
        trials[level] = _FORGET * trials[level] + 1
        hits[level] = _FORGET * hits[level] + right

    def learn_step(self, tokens: float, seconds: float) -> None:
        """What a step gave each row, and what it took by the measured costs."""
        self._tokens = _FORGET * self._tokens + tokens
        self._seconds = _FORGET * self._seconds + seconds
        changed = self._price * (_DEARER if self._full else _CHEAPER)
        self._price, self._full = min(max(changed, _LEAST_PRICE), 1.0), False
        if tokens / seconds > 1 / self._costs.verification[0]:
            # After a trial that paid, the next one comes at once: texts have easier passages.
            self._rest = self._resting = 0

    def _holds_all(self, nodes: int) -> bool:
        """Whether a draft has all nodes that it may have; remembered, if so."""
        full = nodes >= self._costs.most
        self._full |= full
        return full

    def _reckon(self) -> None:
        """Now and then, what drafts are worth by all that was learnt; at first more often."""
        if self._steps % _EVERY == 0 or self._steps.bit_count() == 1:
            # Plain decoding is always to be had.
            worth = max(self._tokens / self._seconds, 1 / self._costs.verification[0])
            firsts = map(truediv, self._hits[0], self._trials[0])
            chances = [[first, *beside] for first, beside in zip(firsts, self._beside, strict=True)]
            self._value = DraftValue(self._costs, worth, self._read, chances)
        self._steps += 1


def _level(sureness: float) -> int:
    return min(int(max(sureness, 0.0) * _LEVELS), _LEVELS - 1)
