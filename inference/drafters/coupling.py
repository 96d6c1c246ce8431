"""Drafts that know the noise: what is about to be drawn, not what is likeliest.

Shapes: B active rows, F paths, C candidates, L looked-at tokens, R ranks.
Source: Daliri et al. 2024, arXiv:2408.07978.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.inference.acceptance.base import look_at_scores_alone, warp
from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.dynamic_tree import Ranking
from medusa_heads.trees.kernels import best

LOOKED_AT = 64  # tokens whose noise is made, of a head or behind a node
# What a draft says of a token differs from what the target says, so the largest sum of score and
# noise is not certain to be drawn. Fitted on held-out text of the demo's target.
_SHARPNESS = 0.7
LEAST = -60.0  # log-probability of what cannot be drawn


def as_drawn(ranking: Ranking, state: DecodingState) -> Ranking:
    """The ranking by which heads draft in this step: where the noise is known, by what it lets the
    target draw."""
    coupled = coupling(state)
    return ranking if coupled is None else _CoupledRanking(ranking, coupled)


def drawn_chances(scores: Tensor, noise: Tensor) -> Tensor:
    """How likely each token is to be drawn (..., C), as log-probabilities, where a drafter gives it
    these scores and this is its noise."""
    return (_SHARPNESS * (scores + noise)).log_softmax(dim=-1).clamp_min(LEAST)


def chances_drawn(
    known: Sequence[tuple[int, float]], luck: Callable[[int], float]
) -> list[tuple[int, float]]:
    """The same of few tokens with their probabilities, on the host: likeliest first."""
    weights = {token: (chance / max(luck(token), 1e-9)) ** _SHARPNESS for token, chance in known}
    total = math.fsum(weights.values()) or 1.0
    ranked = sorted(weights, key=weights.__getitem__, reverse=True)
    return [(token, weights[token] / total) for token in ranked]


class Coupling:
    """What the target is about to draw behind the texts of this step, as far as a drafter's scores
    are the target's: by its warpers, and its noise."""

    def __init__(self, state: DecodingState, noise: Noise) -> None:
        self._rows, self._noise = state.rows, noise
        self._warpers = LogitsProcessorList(
            warper
            for warper in state.warpers or ()
            if look_at_scores_alone(LogitsProcessorList([warper]))
        )

    def best(
        self,
        logits_BFC: Tensor,
        num_ranks: int,
        ahead: Sequence[int],
        tokens_of: Callable[[Tensor], Tensor] = lambda ids: ids,
    ) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities [B, F, R], best first. `ahead` is as for Noise, and
        `tokens_of` gives the tokens that places among the C stand for."""
        most = max(num_ranks, min(LOOKED_AT, logits_BFC.shape[2]))
        logits_BFL, ids_BFL = best(logits_BFC.float(), most)
        tokens_BFL = tokens_of(ids_BFL)
        flat = logits_BFL.flatten(0, 1)
        scores_BFL = warp(self._warpers, None, flat).view_as(logits_BFL)
        noise_BFL = self._noise.of(self._rows, ahead, tokens_BFL)
        best_BFR, places_BFR = drawn_chances(scores_BFL, noise_BFL).topk(num_ranks, dim=-1)
        return tokens_BFL.gather(-1, places_BFR), best_BFR


def coupling(state: DecodingState) -> Coupling | None:
    """None where drafters do not know the noise."""
    return None if state.noise is None else Coupling(state, state.noise)


def best_drafts(
    logits_B1V: Tensor, num_ranks: int, coupled: Coupling | None, ahead: int
) -> tuple[Tensor, Tensor]:
    """The best tokens [B, R] so far ahead, and their probabilities."""
    if coupled is None:
        best_BR = logits_B1V[:, 0].float().softmax(dim=-1).topk(num_ranks, dim=-1)
        return best_BR.indices, best_BR.values
    tokens_B1R, log_probs_B1R = coupled.best(logits_B1V, num_ranks, [ahead])
    return tokens_B1R[:, 0], log_probs_B1R[:, 0].exp()


class _CoupledRanking(Ranking):
    """Heads' temperatures count for nothing here: they were fitted for a text's probabilities, and
    the warpers bring the temperature that tokens are drawn at."""

    def __init__(self, ranking: Ranking, coupled: Coupling) -> None:
        self.heads, self._coupled = ranking.heads, coupled

    def best(
        self,
        logits_BFC: Tensor,
        num_ranks: int,
        level: int | None = None,
        places_BC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        ahead = list(range(logits_BFC.shape[1])) if level is None else [level]
        tokens_of = partial(self.tokens, places_BC=places_BC)
        return self._coupled.best(logits_BFC, num_ranks, ahead, tokens_of)
