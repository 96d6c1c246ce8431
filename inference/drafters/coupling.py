"""Drafts that know the noise: what is about to be drawn, not what is likeliest.

Shapes: B active rows, F paths, C candidates, L looked-at tokens, R ranks.
Source: Daliri et al. 2024, arXiv:2408.07978.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.inference.acceptance.base import look_at_scores_alone
from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.dynamic_tree import Ranking

_LOOKED_AT = 64  # tokens of a head whose noise is made
# What a draft says of a token differs from what the target says, so the largest sum of score and
# noise is not certain to be drawn. Fitted on held-out text of the demo's target.
_SHARPNESS = 0.7
_LEAST = -60.0  # log-probability of what cannot be drawn


def as_drawn(ranking: Ranking, state: DecodingState) -> Ranking:
    """The ranking by which heads draft in this step: where the noise is known, by what it lets the
    target draw."""
    return ranking if state.noise is None else _Coupled(ranking, state, state.noise)


def drawn_chances(scores: Tensor, noise: Tensor) -> Tensor:
    """How likely each token is to be drawn (..., C), as log-probabilities, where a drafter gives it
    these scores and this is its noise."""
    return (_SHARPNESS * (scores + noise)).log_softmax(dim=-1).clamp_min(_LEAST)


def chances_drawn(
    known: Sequence[tuple[int, float]], luck: Callable[[int], float]
) -> list[tuple[int, float]]:
    """The same of few tokens with their probabilities, on the host: likeliest first."""
    weights = {token: (chance / max(luck(token), 1e-9)) ** _SHARPNESS for token, chance in known}
    total = math.fsum(weights.values()) or 1.0
    ranked = sorted(weights, key=weights.__getitem__, reverse=True)
    return [(token, weights[token] / total) for token in ranked]


class _Coupled(Ranking):
    """Candidates by their scores, as the target's warpers would leave them, and the target's noise.

    Heads' temperatures count for nothing here: they were fitted for a text's probabilities, and the
    warpers bring the temperature that tokens are drawn at.
    """

    def __init__(self, ranking: Ranking, state: DecodingState, noise: Noise) -> None:
        self.heads, self._rows, self._noise = ranking.heads, state.rows, noise
        self._warpers = LogitsProcessorList(
            warper
            for warper in state.warpers or ()
            if look_at_scores_alone(LogitsProcessorList([warper]))
        )

    def best(
        self,
        logits_BFC: Tensor,
        num_ranks: int,
        level: int | None = None,
        places_BC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        paths, most = logits_BFC.shape[1], max(num_ranks, min(_LOOKED_AT, logits_BFC.shape[2]))
        logits_BFL, ids_BFL = logits_BFC.float().topk(most, dim=-1)
        tokens_BFL = self.tokens(ids_BFL, places_BC)
        flat: Any = logits_BFL.flatten(0, 1)
        scores_BFL = self._warpers(flat, flat).view_as(logits_BFL)
        ahead = list(range(paths)) if level is None else [level]
        noise_BFL = self._noise.of(self._rows, ahead, tokens_BFL)
        best_BFR, places_BFR = drawn_chances(scores_BFL, noise_BFL).topk(num_ranks, dim=-1)
        return tokens_BFL.gather(-1, places_BFR), best_BFR
