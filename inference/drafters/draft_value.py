"""What another forward of a draft model is worth, and whether to have its tokens verified.

A forward costs seconds, and then says how sure the draft model is of the next tokens. Where it
turns out to be unsure, the draft can still end before them: so a forward is worth what may follow,
over all that it may turn out to say, from the last level backwards.

Shapes: G chances, L levels of sureness, R numbers of tokens behind a node, 0 among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from medusa_heads.inference.draft_costs import DraftCosts

_CHANCES = 24  # that a draft is accepted so far: 1, and each less than the last by ..
_APART = 0.25  # .. so much, in natural logarithms; the last is 0.3 %
_LEAST = 1e-9


class DraftValue:
    """Tokens that drafting on can be expected to gain, less what its seconds are worth.

    Nodes of one level are taken for one, with the sum of their chances.

    Args:
        costs: seconds of a step's parts.
        worth: tokens that a second is worth.
        shares: how often the draft model is as sure as each level says.
        chances: for each level, that the first, second, .. token behind an accepted one is.
    """

    def __init__(
        self,
        costs: DraftCosts,
        worth: float,
        shares: Sequence[float],
        chances: Sequence[Sequence[float]],
    ) -> None:
        seconds = np.asarray(costs.verification)
        self._verifying = (worth * np.diff(seconds)).tolist()
        self._beside = worth * costs.beside
        shares_L = np.asarray(shares) / sum(shares)
        none_L1 = np.zeros((len(shares), 1))
        accepted_LR = np.cumsum(np.concatenate([none_L1, np.asarray(chances)], axis=1), axis=1)
        accepted_LR = np.minimum(accepted_LR, 1.0)
        self._first = float(shares_L @ accepted_LR[:, 1])
        accepted_GLR = np.exp(-_APART * np.arange(_CHANCES))[:, None, None] * accepted_LR
        place_GLR = -np.log(np.maximum(accepted_GLR, _LEAST)) / _APART
        count_R = np.arange(accepted_LR.shape[1])
        value_G = np.zeros(_CHANCES)
        values = [value_G.tolist()]
        for level in reversed(range(costs.deepest)):
            nodes_R = level + count_R
            paid_R = worth * (seconds[np.minimum(nodes_R, costs.most)] - seconds[level])
            paid_R[nodes_R > costs.most] = np.inf
            further_GLR = np.interp(place_GLR, np.arange(_CHANCES), np.maximum(value_G, 0.0))
            best_GL = (accepted_GLR - paid_R + further_GLR).max(axis=2)
            forward = worth * (costs.further if level else costs.first)
            value_G = best_GL @ shares_L - forward
            values.append(value_G.tolist())
        self._values = values[::-1]

    def of_reading(self, level: int, chance: float) -> float:
        """A forward behind a draft of `level` tokens, which are all accepted with that chance."""
        place = min(-math.log(max(chance, _LEAST)) / _APART, _CHANCES - 1.0)
        if place <= 0:  # chances may add up to more than a certainty
            return self._values[level][0]
        low = min(int(place), _CHANCES - 2)
        below, above = self._values[level][low : low + 2]
        return below + (place - low) * (above - below)

    def of_verifying(self, level: int, nodes: int, promised: float, chance: float) -> float:
        """One more token behind a draft of `level` tokens, accepted together with them with that
        chance, and what may follow it; beside others of which one is, with a chance of `promised`,
        and behind a total of `nodes`."""
        if nodes >= len(self._verifying):
            return -math.inf
        further = max(self.of_reading(level + 1, promised + chance), 0.0)
        further -= max(self.of_reading(level + 1, promised), 0.0) if promised else 0.0
        return chance - self._verifying[nodes] + further

    def of_reading_beside(self, nodes: int, chance: float) -> float:
        """A node that is accepted with that chance, in a forward that is made for others anyway."""
        if nodes >= len(self._verifying):
            return -math.inf
        return self._first * chance - self._verifying[nodes] - self._beside
