"""Drafts from Medusa heads: the heads' top-k fill a static sparse tree.

Shapes: B batch, K heads, N tree nodes, R ranks, V vocabulary.
Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, sections 2.1.2 and 2.3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.heads import MedusaHeads
from medusa_heads.tree import TokenTree, TreeShape

if TYPE_CHECKING:
    from medusa_heads.inference.state import DecodingState


class MedusaDrafter:
    """One forward of the heads on the last hidden state; node (r_0, .., r_d) takes head d's r_d-th
    best token.

    Args:
        heads: the heads, on their target's device.
        shape: the static tree.

    Raises:
        ValueError: the tree is deeper than there are heads, or wider than the vocabulary.
    """

    def __init__(self, heads: MedusaHeads, shape: TreeShape) -> None:
        if shape.max_depth > heads.config.num_heads:
            raise ValueError(
                f"the tree is {shape.max_depth} levels deep, but there are only "
                f"{heads.config.num_heads} heads: use a shallower tree"
            )
        vocab_size = heads.config.vocab_size
        assert vocab_size is not None
        if shape.max_rank >= vocab_size:
            raise ValueError(f"the tree asks for rank {shape.max_rank} of {vocab_size} tokens")
        self.heads = heads
        self.shape = shape
        self._num_ranks = shape.max_rank + 1
        # Where each drafted node finds its token in the flattened [K, R] table of candidates.
        self._picks = [(len(path) - 1) * self._num_ranks + path[-1] for path in shape.choices]
        self._picks_N: Tensor | None = None

    def propose(self, state: DecodingState) -> TokenTree:
        """The heads' candidates in the static tree, for every active row."""
        if not self._picks:
            return TokenTree.root_only(state.roots_B)
        if self._picks_N is None or self._picks_N.device != state.roots_B.device:
            self._picks_N = torch.tensor(self._picks, device=state.roots_B.device)
        logits_BKV = self.heads(state.hidden_BD)
        candidates_BKR = logits_BKV.topk(self._num_ranks, dim=-1).indices
        drafted_BN = candidates_BKR.flatten(1).index_select(1, self._picks_N)
        return self.shape.tree(torch.cat([state.roots_B[:, None], drafted_BN], dim=1))
