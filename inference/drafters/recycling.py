"""Drafts from what the target nearly wrote: the likeliest successors of every token, seen lately.

Shapes: B active rows, N tree nodes, V vocabulary, R ranks.
Source: token recycling (Luo et al. 2024, arXiv:2408.08696).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level
from medusa_heads.inference.drafters.coupling import chances_drawn
from medusa_heads.inference.drafters.growing import Proposal, Source, by_drawing
from medusa_heads.inference.engine.noise import Luck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.tree import TokenTree

RANKS = 8  # successors kept of each token, as in the paper
_UNKNOWN = -1
_PRIOR = 0.6  # what a successor's probability elsewhere is worth here


class RecyclingSource(Source):
    """The successors that each token had when the target last read it.

    Every verified node, accepted or not, says what the target takes to follow its token: the matrix
    of successors costs no forward of its own, and is carried from text to text.
    """

    name = "recycling"
    observes = True

    def __init__(self, vocab_size: int) -> None:
        self._successors_VR = np.full((vocab_size, RANKS), _UNKNOWN, dtype=np.int64)
        self._chances_VR = np.zeros((vocab_size, RANKS), dtype=np.float32)
        self.evidence = by_drawing(lambda: Evidence([_PRIOR] * (2 * LEVELS)))
        self._seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def draft(self, state: DecodingState) -> list[Proposal]:
        # Only now: what the last step offered was learnt from with the matrix as it was.
        for tokens_BN, successors_BNR, chances_BNR in self._seen:
            ranks = successors_BNR.shape[-1]
            self._successors_VR[tokens_BN, :ranks] = successors_BNR
            self._chances_VR[tokens_BN, :ranks] = chances_BNR
        self._seen.clear()
        evidence, noise = self.evidence[state.drawing], state.noise
        lucks = [None if noise is None else noise.luck(row) for row in state.rows]
        return [
            Proposal(evidence, (row.tokens[-1], 0), partial(self._behind, luck))
            for row, luck in zip(state.rows, lucks, strict=True)
        ]

    def _behind(self, luck: Luck | None, place: Any) -> list[tuple[int, float, int, Any]]:
        """The successors of a token. A place is a token, and how far ahead of it they stand."""
        before, ahead = place
        successors = self._successors_VR[before].tolist()
        if successors[0] == _UNKNOWN:
            return []
        chances = self._chances_VR[before].tolist()
        known = [pair for pair in zip(successors, chances, strict=True) if pair[0] != _UNKNOWN]
        if luck is not None:
            known = chances_drawn(known, partial(luck, ahead))
        return [
            (token, chance, level(chance) + LEVELS * (rank > 0), (token, ahead + 1))
            for rank, (token, chance) in enumerate(known)
        ]

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """Take note of what the target has just said behind every node."""
        best = logits_BNV.topk(min(RANKS, logits_BNV.shape[-1]), dim=-1)
        chances_BNR = best.values.float().softmax(dim=-1).cpu().numpy()
        self._seen.append((tree.tokens_BN.cpu().numpy(), best.indices.cpu().numpy(), chances_BNR))

    def expected(self, nodes: int) -> float:
        return 0.8 * nodes / (nodes + 3.0)
