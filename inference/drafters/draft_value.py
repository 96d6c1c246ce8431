"""What another forward of a draft model is worth, and whether to have its token verified.

A forward costs seconds, and then says how sure the draft model is of the next token. Where it turns
out to be unsure, the draft can still end before that token: so a forward is worth what may follow,
over all that it may turn out to say, from the last depth backwards.

Shapes: D depths, G chances, L levels of sureness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from medusa_heads.inference.draft_costs import DraftCosts

_CHANCES = 24  # that all tokens so far are accepted: 1, and each less than the last by ..
_APART = 0.25  # .. so much, in natural logarithms; the last is 0.3 %


class DraftValue:
    """Tokens that drafting on can be expected to gain, less what its seconds are worth.

    Args:
        costs: seconds of a step's parts.
        worth: tokens that a second is worth.
        shares: how often the draft model is as sure as each level says.
        chances: how often tokens of each level are accepted, behind accepted ones.
    """

    def __init__(
        self, costs: DraftCosts, worth: float, shares: Sequence[float], chances: Sequence[float]
    ) -> None:
        self._verifying = [worth * seconds for seconds in np.diff(costs.verification).tolist()]
        shares_L, chances_L = np.asarray(shares) / sum(shares), np.asarray(chances)
        chance_G = np.exp(-_APART * np.arange(_CHANCES))
        accepted_GL = chance_G[:, None] * chances_L
        less_L = np.rint(-np.log(np.maximum(chances_L, 1e-9)) / _APART).astype(int)
        then_GL = np.minimum(np.arange(_CHANCES)[:, None] + less_L, _CHANCES - 1)
        value_G = np.zeros(_CHANCES)
        values_DG = [value_G.tolist()]
        for depth in reversed(range(costs.most)):
            further_GL = np.maximum(value_G, 0.0)[then_GL]
            verified_GL = accepted_GL - self._verifying[depth] + further_GL
            forward = worth * (costs.further if depth else costs.first)
            value_G = np.maximum(verified_GL, 0.0) @ shares_L - forward
            values_DG.append(value_G.tolist())
        self._values_DG = values_DG[::-1]

    def of_reading(self, depth: int, chance: float) -> float:
        """A forward behind `depth` drafted tokens, which are all accepted with that chance."""
        place = round(-math.log(max(chance, 1e-9)) / _APART)
        return self._values_DG[depth][min(place, _CHANCES - 1)]

    def of_verifying(self, depth: int, chance: float) -> float:
        """Of the token behind `depth` drafted ones, accepted together with them with that chance,
        and of what may follow it."""
        further = max(self.of_reading(depth + 1, chance), 0.0)
        return chance - self._verifying[depth] + further
