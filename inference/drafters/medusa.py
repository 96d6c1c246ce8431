"""Drafts from Medusa heads: one forward of all heads on the last hidden state, in a static tree.

Shapes: B batch, K heads, N tree nodes, R ranks.
Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, sections 2.1.2 and 2.3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from medusa_heads.heads import DraftHeads
from medusa_heads.inference.drafters.prefix import encoded_hidden
from medusa_heads.inference.drafters.static import StaticDrafter
from medusa_heads.trees.guesses import candidates
from medusa_heads.trees.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

    from medusa_heads.inference.engine.state import DecodingState


class MedusaDrafter(StaticDrafter[DraftHeads]):
    """Heads that do not see each other: node (r_0, .., r_d) takes head d's r_d-th best token."""

    _picks_N: Tensor | None = None
    """Where each drafted node finds its token in the flattened [K, R] table of candidates."""

    def _draft(self, state: DecodingState) -> TokenTree:
        roots_B1 = state.roots_B[:, None]
        ranks = self.shape.max_rank + 1
        if self._picks_N is None or self._picks_N.device != roots_B1.device:
            picks = [(len(path) - 1) * ranks + path[-1] for path in self.shape.choices]
            self._picks_N = torch.tensor(picks, device=roots_B1.device)
        hidden_BD = encoded_hidden(self._heads, state)
        if not self._with_log_probs:
            ids_BKR = self._heads(hidden_BD).topk(ranks, dim=-1).indices
            drafted_BN = self._heads.token_ids(ids_BKR.flatten(1).index_select(1, self._picks_N))
            return self.shape.tree(torch.cat([roots_B1, drafted_BN], dim=1))
        tokens_BKR, log_probs_BKR = candidates(self._heads, hidden_BD, ranks, self._temperatures)
        drafted_BN = tokens_BKR.flatten(1).index_select(1, self._picks_N)
        drafted_log_probs_BN = log_probs_BKR.flatten(1).index_select(1, self._picks_N)
        certain_B1 = drafted_log_probs_BN.new_zeros(roots_B1.shape)
        return self.shape.tree(
            torch.cat([roots_B1, drafted_BN], dim=1),
            torch.cat([certain_B1, drafted_log_probs_BN], dim=1),
        )
