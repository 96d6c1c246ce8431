"""Drafts from Medusa heads: one forward of all heads on the last hidden state, arranged in a tree.

Shapes: B batch, K heads, N tree nodes, R ranks, V vocabulary.
Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, sections 2.1.2 and 2.3.3; trees rebuilt at
every step in the manner of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.dynamic_tree import DYNAMIC_RANKS, best_first_tree
from medusa_heads.heads import MedusaHeads
from medusa_heads.tree import TokenTree, TreeShape

if TYPE_CHECKING:
    from medusa_heads.inference.state import DecodingState


class _HeadCandidates:
    """Each head's best tokens, and their log-probabilities where asked for."""

    def __init__(
        self, heads: MedusaHeads, num_ranks: int, temperatures: Sequence[float] | None
    ) -> None:
        vocab_size = heads.config.vocab_size
        assert vocab_size is not None
        if num_ranks > vocab_size:
            raise ValueError(f"the tree asks for rank {num_ranks - 1} of {vocab_size} tokens")
        self._heads = heads
        self._num_ranks = num_ranks
        self._inverse_temperatures = [1 / t for t in temperatures or [1.0] * heads.config.num_heads]

    def __call__(self, state: DecodingState, with_log_probs: bool) -> tuple[Tensor, Tensor | None]:
        logits_BKV = self._heads(state.hidden_BD)
        best_BKR, candidates_BKR = logits_BKV.topk(self._num_ranks, dim=-1)
        if not with_log_probs:
            return candidates_BKR, None
        inverse_K1 = logits_BKV.new_tensor(self._inverse_temperatures, dtype=torch.float32)[:, None]
        total_BK1 = (logits_BKV.float() * inverse_K1).logsumexp(dim=-1, keepdim=True)
        return candidates_BKR, best_BKR.float() * inverse_K1 - total_BK1


class MedusaDrafter:
    """A static tree: node (r_0, .., r_d) takes head d's r_d-th best token.

    Args:
        heads: the heads, on their target's device.
        shape: the tree.
        temperatures: of the heads' probabilities.
        with_log_probs: give the nodes' draft probabilities too, for rules that compare with them.

    Raises:
        ValueError: the tree is deeper than there are heads, or wider than the vocabulary.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        shape: TreeShape,
        *,
        temperatures: Sequence[float] | None = None,
        with_log_probs: bool = False,
    ) -> None:
        if shape.max_depth > heads.config.num_heads:
            raise ValueError(
                f"the tree is {shape.max_depth} levels deep, but there are only "
                f"{heads.config.num_heads} heads: use a shallower tree"
            )
        self.shape = shape
        num_ranks = shape.max_rank + 1
        self._candidates = _HeadCandidates(heads, num_ranks, temperatures)
        self._with_log_probs = with_log_probs
        # Where each drafted node finds its token in the flattened [K, R] table of candidates.
        self._picks = [(len(path) - 1) * num_ranks + path[-1] for path in shape.choices]
        self._picks_N: Tensor | None = None

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
        candidates_BKR, log_probs_BKR = self._candidates(state, self._with_log_probs)
        drafted_BN = candidates_BKR.flatten(1).index_select(1, self._picks_N)
        tokens_BN = torch.cat([roots_B1, drafted_BN], dim=1)
        if log_probs_BKR is None:
            return self.shape.tree(tokens_BN)
        drafted_log_probs_BN = log_probs_BKR.flatten(1).index_select(1, self._picks_N)
        certain_B1 = drafted_log_probs_BN.new_zeros(roots_B1.shape)
        return self.shape.tree(tokens_BN, torch.cat([certain_B1, drafted_log_probs_BN], dim=1))


class DynamicMedusaDrafter:
    """A tree of fixed size, shaped anew at every step by the heads' calibrated probabilities.

    Args:
        heads: the heads, on their target's device.
        num_drafted: nodes besides the root.
        temperatures: of the heads' probabilities, fitted on held-out text.

    Raises:
        ValueError: no node, or more than the heads' candidates can form.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        num_drafted: int,
        *,
        temperatures: Sequence[float] | None = None,
    ) -> None:
        ranks = min(DYNAMIC_RANKS, heads.config.vocab_size or DYNAMIC_RANKS)
        most = sum(ranks ** (level + 1) for level in range(heads.config.num_heads))
        if not 1 <= num_drafted <= most:
            raise ValueError(f"a dynamic tree here has 1 to {most} nodes, got {num_drafted}")
        self._num_drafted = num_drafted
        self._candidates = _HeadCandidates(heads, ranks, temperatures)

    @property
    def num_nodes(self) -> int:
        """Nodes of every proposed tree, the root included."""
        return self._num_drafted + 1

    def propose(self, state: DecodingState) -> TokenTree:
        """The likeliest nodes, for every active row."""
        candidates_BKR, log_probs_BKR = self._candidates(state, with_log_probs=True)
        assert log_probs_BKR is not None
        return best_first_tree(state.roots_B, candidates_BKR, log_probs_BKR, self._num_drafted)
