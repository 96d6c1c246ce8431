"""The exact rule whose noise drafters may know.

Shapes: W rows still walking, V vocabulary.
Source: Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative
decoding", arXiv:2408.07978.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_heads.inference.acceptance.lossless import SampleThenMatch
from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.rows import Row

_NONE = -1  # no token


class Coupled(SampleThenMatch):
    """Exact for all drafts: at each node the target's next token is the argmax of its processed
    scores and Gumbel noise, which has the target's own distribution whatever was drafted.

    The noise is known beforehand. Drafters add the same noise to what they take to follow, and so
    draft the token that is about to be drawn, not the likeliest one. A seed's text depends on the
    target and its prompt alone: not on drafts, trees, other rows, or padding. It is not the text of
    generate() with that seed.
    """

    noise: Noise | None = None

    def _pick(self, scores_WV: Tensor, rows: Sequence[Row]) -> Tensor:
        if self.noise is None:
            return super()._pick(scores_WV, rows)
        tokens_V = torch.arange(scores_WV.shape[1], device=scores_WV.device)
        tokens_W1V = tokens_V.expand(len(rows), 1, -1)
        # Near 0, where noise that is added keeps its digits however large the scores are.
        best_W1 = scores_WV.amax(dim=-1, keepdim=True)
        noisy_WV = scores_WV - best_W1 + self.noise.of(rows, [0], tokens_W1V)[:, 0]
        return noisy_WV.argmax(dim=-1).where(best_W1[:, 0].isfinite(), _NONE)

    def _draw(
        self, logits_BNV: Tensor, rows: Sequence[Row], walking: Sequence[int], nodes: Sequence[int]
    ) -> list[int]:
        drawn = super()._draw(logits_BNV, rows, walking, nodes)
        if _NONE in drawn:  # as multinomial refuses them
            raise ValueError(
                "the processed scores of a next token are no distribution: each is -inf, or some "
                "are inf or nan"
            )
        return drawn
