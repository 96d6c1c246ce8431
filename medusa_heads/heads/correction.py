"""What the token before tells a head that has not seen it.

Heads that draft in one pass cannot know which of their candidates go together. One low-rank
product, the same for all heads, tells: `after @ before[token]` is added to the logits of the token
behind it. It takes a row of a table, and W / D of the time of the vocabulary matrix's product.

Source: the sequential head of DSpark (DeepSeek 2026, arXiv:2607.05147), on heads of any kind.

Shapes: R rows (any leading dimensions), V vocabulary, C candidates of the heads, W rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SPREAD = 0.1  # of a fresh table's entries


class Correction(nn.Module):
    """`before` [V, W], a row for each token of the target, and `after` [C, W]; adds nothing while
    it is fresh."""

    def __init__(self, vocab_size: int, num_candidates: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Embedding(vocab_size, rank)
        self.after = nn.Linear(rank, num_candidates, bias=False)
        nn.init.normal_(self.before.weight, std=_SPREAD)
        nn.init.zeros_(self.after.weight)

    def add_to(self, logits_RC: Tensor, before_R: Tensor) -> Tensor:
        """The logits after the tokens that stand before each."""
        flat_NC = logits_RC.flatten(0, -2)
        before_NW, after_CW = (side.to(flat_NC.dtype) for side in self.factors(before_R.flatten()))
        return torch.addmm(flat_NC, before_NW, after_CW.T).view(logits_RC.shape)

    def factors(self, before_R: Tensor) -> tuple[Tensor, Tensor]:
        """The product's two sides: what the tokens bring [..., W], and what comes of it [C, W]."""
        return F.embedding(before_R, self.before.weight), self.after.weight
