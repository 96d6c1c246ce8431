"""What the token before tells a head that has not seen it.

Heads that draft in one pass cannot know which of their candidates go together. One low-rank
product, the same for all heads, tells: `after @ before[token]` is added to the logits of the token
behind it. It takes a row of a table, and W / D of the time of the vocabulary matrix's product.

Source: the sequential head of DSpark (DeepSeek 2026, arXiv:2607.05147), on heads of any kind.

Shapes: R rows (any leading dimensions), B batch, F paths, J tokens of a path, K heads, V
vocabulary, C candidates of the heads or some of them, W rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIKELY = 512  # tokens of a head's own that drafting corrects


class Correction(nn.Module):
    """`before` [V, W], a row for each token of the target, and `after` [C, W]; adds nothing while
    it is fresh.

    A fresh `before` stands at unit scale, as an optimiser sees it: a step moves every entry of
    `after` by the rate, and so the logits by the rate times the size of these rows.
    """

    def __init__(self, vocab_size: int, num_candidates: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Embedding(vocab_size, rank)
        self.after = nn.Linear(rank, num_candidates, bias=False)
        nn.init.normal_(self.before.weight)
        nn.init.zeros_(self.after.weight)

    def add_to(self, logits_RC: Tensor, before_R: Tensor) -> Tensor:
        """The logits after the tokens that stand before each."""
        flat_NC = logits_RC.flatten(0, -2)
        before_NW, after_CW = (side.to(flat_NC.dtype) for side in self.factors(before_R.flatten()))
        return torch.addmm(flat_NC, before_NW, after_CW.T).view(logits_RC.shape)

    def factors(self, before_R: Tensor) -> tuple[Tensor, Tensor]:
        """The product's two sides: what the tokens bring [..., W], and what comes of it [C, W]."""
        # A prompt may have ids that are never written, with which drafts may continue it.
        known_R = before_R.clamp_max(self.before.weight.shape[0] - 1)
        return F.embedding(known_R, self.before.weight), self.after.weight


class AfterPaths:
    """What heads that do not see each other say after drafted paths: an `After` (base.py).

    Args:
        correction: what the token before tells them, if anything.
        logits_BKC: what they say without.
        likely: how many tokens of each head's own the correction chooses among; None for all.
    """

    def __init__(
        self, correction: Correction | None, logits_BKC: Tensor, likely: int | None
    ) -> None:
        self._correction = correction
        self._places_KBC: Sequence[Tensor] | None = None
        if correction is not None and likely is not None and likely < logits_BKC.shape[-1]:
            logits_BKC, places_BKC = logits_BKC.topk(likely, dim=-1, sorted=False)
            # Of all heads at once: calls take longer than so few rows.
            after_BKCW = F.embedding(places_BKC, correction.after.weight).to(logits_BKC.dtype)
            self._places_KBC, self._after_KBWC = places_BKC.unbind(1), after_BKCW.mT.unbind(1)
        self._logits_KB1C = logits_BKC.unsqueeze(2).unbind(1)

    def __call__(
        self, head: int, paths_BFJ: Tensor, above_BF: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        logits_B1C, before_BF = self._logits_KB1C[head], paths_BFJ[..., -1]
        if self._correction is None:
            return logits_B1C.expand(-1, before_BF.shape[1], -1), None
        before_BFW, after_CW = self._correction.factors(before_BF)
        before_BFW = before_BFW.to(logits_B1C.dtype)
        if self._places_KBC is None:
            return F.linear(before_BFW, after_CW.to(before_BFW.dtype)).add_(logits_B1C), None
        logits_BFC = torch.baddbmm(logits_B1C, before_BFW, self._after_KBWC[head])
        return logits_BFC, self._places_KBC[head]
