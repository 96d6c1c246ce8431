"""Drafts from Medusa heads: one forward of all heads on the last hidden state, in a static tree.

Shapes: B batch, K heads, N tree nodes, R ranks.
Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, sections 2.1.2 and 2.3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.heads import DraftHeads
from medusa_heads.inference.drafters.prefix import encoded_hidden
from medusa_heads.trees.guesses import candidates
from medusa_heads.trees.tree import TokenTree, TreeShape

if TYPE_CHECKING:
    from medusa_heads.inference.engine.state import DecodingState


class MedusaDrafter:
    """A static tree: node (r_0, .., r_d) takes head d's r_d-th best token.

    Args:
        heads: independent heads, on their target's device.
        shape: the tree.
        temperatures: of the heads' probabilities.
        with_log_probs: give the nodes' draft probabilities too, for rules that compare with them.

    Raises:
        ValueError: the tree is deeper than there are heads, or wider than their vocabulary.
    """

    def __init__(
        self,
        heads: DraftHeads,
        shape: TreeShape,
        *,
        temperatures: Sequence[float] | None = None,
        with_log_probs: bool = False,
    ) -> None:
        check_shape(heads, shape)
        self.shape = shape
        self._heads = heads
        self._num_ranks = shape.max_rank + 1
        self._temperatures = list(temperatures or [1.0] * heads.config.num_heads)
        self._with_log_probs = with_log_probs
        # Where each drafted node finds its token in the flattened [K, R] table of candidates.
        self._picks = [(len(path) - 1) * self._num_ranks + path[-1] for path in shape.choices]
        self._picks_N: Tensor | None = None
        self.reads_prompt = heads.config.prefix_attention

    @property
    def num_nodes(self) -> int:
        """Nodes of every proposed tree, the root included."""
        return self.shape.num_nodes

    def propose(self, state: DecodingState) -> TokenTree:
        """The heads' candidates in the static tree, for every active row."""
        if not self._picks:
            return TokenTree.root_only(state.roots_B)
        roots_B1 = state.roots_B[:, None]
        if self._picks_N is None or self._picks_N.device != roots_B1.device:
            self._picks_N = torch.tensor(self._picks, device=roots_B1.device)
        hidden_BD = encoded_hidden(self._heads, state)
        if not self._with_log_probs:
            ids_BKR = self._heads(hidden_BD).topk(self._num_ranks, dim=-1).indices
            drafted_BN = self._heads.token_ids(ids_BKR.flatten(1).index_select(1, self._picks_N))
            return self.shape.tree(torch.cat([roots_B1, drafted_BN], dim=1))
        tokens_BKR, log_probs_BKR = candidates(
            self._heads, hidden_BD, self._num_ranks, self._temperatures
        )
        drafted_BN = tokens_BKR.flatten(1).index_select(1, self._picks_N)
        drafted_log_probs_BN = log_probs_BKR.flatten(1).index_select(1, self._picks_N)
        certain_B1 = drafted_log_probs_BN.new_zeros(roots_B1.shape)
        return self.shape.tree(
            torch.cat([roots_B1, drafted_BN], dim=1),
            torch.cat([certain_B1, drafted_log_probs_BN], dim=1),
        )


def check_shape(heads: DraftHeads, shape: TreeShape) -> None:
    """Raises ValueError where the tree is deeper or wider than the heads can draft."""
    if shape.max_depth > heads.config.num_heads:
        raise ValueError(
            f"the tree is {shape.max_depth} levels deep, but there are only "
            f"{heads.config.num_heads} heads: use a shallower tree"
        )
    if shape.max_rank >= heads.config.num_candidates:
        raise ValueError(
            f"the tree asks for rank {shape.max_rank} of {heads.config.num_candidates} tokens"
        )
