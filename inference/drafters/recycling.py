"""Drafts from what the target nearly wrote: the likeliest successors of every token, seen lately.

Shapes: B active rows, N tree nodes, V vocabulary, R ranks.
Source: token recycling (Luo et al. 2024, arXiv:2408.08696).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from medusa_heads.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree

RANKS = 8  # successors kept of each token, as in the paper
_UNKNOWN = -1
# How often the successor of each rank is the right one; how far that holds here is learnt.
_CHANCES = (0.4, 0.13, 0.07, 0.045, 0.03, 0.025, 0.02, 0.015)


class RecyclingDrafter:
    """A tree of the successors that each token had when the target last read it.

    Every verified node, accepted or not, says what the target takes to follow its token: the matrix
    of successors costs no forward of its own, and is carried from text to text.

    Args:
        vocab_size: V of the target.
        num_drafted: nodes besides the root.
    """

    reads_prompt = False

    def __init__(self, vocab_size: int, num_drafted: int) -> None:
        self._successors_VR = np.full((vocab_size, RANKS), _UNKNOWN, dtype=np.int64)
        self._num_drafted = num_drafted

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """Take note of what the target has just said behind every node."""
        ranks = min(RANKS, logits_BNV.shape[-1])
        best_BNR = logits_BNV.topk(ranks, dim=-1).indices.cpu().numpy()
        self._successors_VR[tree.tokens_BN.cpu().numpy(), :ranks] = best_BNR

    def grow(self, state: DecodingState) -> list[PrefixTree]:
        """See Grower."""
        return [self._grow(root) for root in state.roots_B.tolist()]

    def _grow(self, root: int) -> PrefixTree:
        """The likeliest paths: a node's next best sibling and its first child come after it."""
        tree = PrefixTree(root)
        waiting: list[tuple[float, int, int]] = []
        self._offer(waiting, tree, 0, 0)
        while waiting and len(tree) <= self._num_drafted:
            chance, parent, rank = heapq.heappop(waiting)
            token = int(self._successors_VR[tree.tokens[parent], rank])
            node = tree.add(parent, token, -chance)
            self._offer(waiting, tree, parent, rank + 1)
            self._offer(waiting, tree, node, 0)
        return tree

    def _offer(
        self, waiting: list[tuple[float, int, int]], tree: PrefixTree, parent: int, rank: int
    ) -> None:
        if rank < RANKS and self._successors_VR[tree.tokens[parent], rank] != _UNKNOWN:
            # Chances are negated: the heap hands out the smallest.
            heapq.heappush(waiting, (-tree.chances[parent] * _CHANCES[rank], parent, rank))
