"""Drafts from what the target nearly wrote: the likeliest successors of every token, seen lately.

Shapes: B active rows, N tree nodes, V vocabulary, R ranks.
Source: token recycling (Luo et al. 2024, arXiv:2408.08696).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level
from medusa_heads.inference.drafters.growing import Proposal

if TYPE_CHECKING:
    from medusa_heads.inference.engine.state import DecodingState
    from medusa_heads.trees.tree import TokenTree

RANKS = 8  # successors kept of each token, as in the paper
_UNKNOWN = -1
_PRIOR = 0.6  # what a successor's probability elsewhere is worth here


class RecycledProposal(Proposal):
    """The successors of tokens. A place is a token."""

    def __init__(
        self, evidence: Evidence, root: int, successors_VR: np.ndarray, chances_VR: np.ndarray
    ) -> None:
        super().__init__(evidence, root)
        self._successors_VR, self._chances_VR = successors_VR, chances_VR

    def _behind(self, place: Hashable) -> list[tuple[int, float, int, Hashable]]:
        assert isinstance(place, int)
        successors = self._successors_VR[place].tolist()
        if successors[0] == _UNKNOWN:
            return []
        chances = self._chances_VR[place].tolist()
        return [
            (token, chance, level(chance) + LEVELS * (rank > 0), token)
            for rank, (token, chance) in enumerate(zip(successors, chances, strict=True))
            if token != _UNKNOWN
        ]


class RecyclingSource:
    """The successors that each token had when the target last read it.

    Every verified node, accepted or not, says what the target takes to follow its token: the matrix
    of successors costs no forward of its own, and is carried from text to text.

    Args:
        vocab_size: V of the target.
    """

    name = "recycling"
    reads_prompt = False

    def __init__(self, vocab_size: int) -> None:
        self._successors_VR = np.full((vocab_size, RANKS), _UNKNOWN, dtype=np.int64)
        self._chances_VR = np.zeros((vocab_size, RANKS), dtype=np.float32)
        # Of tokens that the target chooses, and of those that it draws.
        self._evidence = {drawn: Evidence([_PRIOR] * (2 * LEVELS)) for drawn in (False, True)}
        self._seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def draft(self, state: DecodingState) -> list[RecycledProposal]:
        """See Source."""
        # Only now: what the last step offered was learnt from with the matrix as it was.
        for tokens_BN, successors_BNR, chances_BNR in self._seen:
            ranks = successors_BNR.shape[-1]
            self._successors_VR[tokens_BN, :ranks] = successors_BNR
            self._chances_VR[tokens_BN, :ranks] = chances_BNR
        self._seen.clear()
        evidence = self._evidence[state.warpers is not None]
        return [
            RecycledProposal(evidence, root, self._successors_VR, self._chances_VR)
            for root in [row.tokens[-1] for row in state.rows]
        ]

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """Take note of what the target has just said behind every node."""
        best = logits_BNV.topk(min(RANKS, logits_BNV.shape[-1]), dim=-1)
        self._seen.append(
            (
                tree.tokens_BN.cpu().numpy(),
                best.indices.cpu().numpy(),
                best.values.float().softmax(dim=-1).cpu().numpy(),
            )
        )

    def expected(self, nodes: int) -> float:
        """See Source."""
        return 0.8 * nodes / (nodes + 3.0)
