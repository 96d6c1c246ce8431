"""Drafts from what the target nearly wrote: the likeliest successors of every token, seen lately.

Shapes: B active rows, N tree nodes, M nodes of all rows, V vocabulary, R ranks, F paths, J tokens
of a path.
Source: token recycling (Luo et al. 2024, arXiv:2408.08696).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level, levels
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.coupling import LEAST, chances_drawn, drawn_chances
from medusa_heads.inference.drafters.growing import Offer, Proposal, Source, by_drawing
from medusa_heads.inference.engine.noise import Luck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.dynamic_tree import DYNAMIC_SIZES, DYNAMIC_WIDTH, Guess, best_first_tree
from medusa_heads.trees.kernels import best
from medusa_heads.trees.tree import TokenTree

RANKS = 8  # successors kept of each token, as in the paper
_UNKNOWN = -1
_MOST_PAIRED = 1024  # nodes of all rows
_LEVELS = 8  # of trees on the device
_BY_RANK = LEVELS * (np.arange(RANKS) > 0)  # the likeliest successors are a group of their own
_PRIOR = 0.6  # what a successor's probability elsewhere is worth here


class RecyclingSource(Source):
    """The successors that each token had when the target last read it. Every verified node,
    accepted or not, says what the target takes to follow its token: the matrix of successors costs
    no forward of its own, and is carried from text to text."""

    name = "recycling"
    observes = True

    def __init__(self, vocab_size: int) -> None:
        self._successors_VR = np.full((vocab_size, RANKS), _UNKNOWN, dtype=np.int64)
        self._chances_VR = np.zeros((vocab_size, RANKS), dtype=np.float32)
        self._groups_VR = np.zeros((vocab_size, RANKS), dtype=np.int8)
        self.evidence = by_drawing(lambda: Evidence([_PRIOR] * (4 * LEVELS)))
        self._seen: list[tuple[np.ndarray, ...]] = []

    def draft(self, state: DecodingState) -> list[Proposal]:
        # Only now: what the last step offered was learnt from with the matrix as it was.
        for tokens_M, successors_MR, chances_MR in self._seen:
            ranks = successors_MR.shape[-1]
            self._successors_VR[tokens_M, :ranks] = successors_MR
            self._chances_VR[tokens_M, :ranks] = chances_MR
            self._groups_VR[tokens_M, :ranks] = levels(chances_MR) + _BY_RANK[:ranks]
        self._seen.clear()
        evidence, noise = self.evidence[state.drawing], state.noise
        if noise is not None:
            return [
                Proposal(evidence, (row.tokens[-1], 0), partial(self._drawn, noise.luck(row)))
                for row in state.rows
            ]
        known: dict[Any, list[Offer]] = {}  # the same for all rows
        return [Proposal(evidence, row.tokens[-1], self._behind, known) for row in state.rows]

    def _behind(self, token: int) -> list[tuple[int, float, int, int]]:
        """The successors of a token, which is their place."""
        successors: list[int] = self._successors_VR[token].tolist()
        if successors[-1] == _UNKNOWN:
            successors = [each for each in successors if each != _UNKNOWN]
        chances, groups = self._chances_VR[token].tolist(), self._groups_VR[token].tolist()
        return [*zip(successors, chances, groups, successors, strict=False)]

    def _drawn(self, luck: Luck, place: tuple[int, int]) -> list[tuple[int, float, int, Any]]:
        """Those that are likely to be drawn. A place is a token, and how far ahead of it they
        stand."""
        before, ahead = place
        known = [(token, chance) for token, chance, _, _ in self._behind(before)]
        # Behind tokens that were right it is right more often than at the text's end.
        further = 2 * LEVELS * (ahead > 0)
        return [
            (token, chance, level(chance) + LEVELS * (rank > 0) + further, (token, ahead + 1))
            for rank, (token, chance) in enumerate(chances_drawn(known, partial(luck, ahead)))
        ]

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """Take note of what the target has just said behind every node."""
        tokens_M, logits_MV = tree.tokens_BN.flatten(), logits_BNV.flatten(0, 1)
        # Of a token that is there more than once, the last node counts.
        last = {token: node for node, token in enumerate(tokens_M.tolist())}
        if len(last) < len(tokens_M):
            nodes_M = torch.tensor([*last.values()], device=logits_MV.device)
            tokens_M, logits_MV = tokens_M[nodes_M], logits_MV.index_select(0, nodes_M)
        best = logits_MV.topk(min(RANKS, logits_MV.shape[-1]), dim=-1)
        chances_MR = _numbers(best.values).softmax(dim=-1).cpu().numpy()
        seen = tokens_M.cpu().numpy(), best.indices.cpu().numpy(), chances_MR
        told_M = ~np.isnan(chances_MR[:, 0])  # of a node that says nothing nothing is kept
        self._seen.append(tuple(of[told_M] for of in seen))

    def expected(self, nodes: int) -> float:
        return 0.8 * nodes / (nodes + 3.0)


class RecycledTrees(Drafter):
    """Trees of the same size at every step, by the same matrix as tensors on the target's device:
    nothing in them is asked of the host. Raises ValueError: no node, or more than successors can
    form.

    Args:
        vocab_size: of the target.
        num_drafted: nodes besides the root.
    """

    def __init__(self, vocab_size: int, num_drafted: int) -> None:
        most = DYNAMIC_SIZES[-1]
        if not 1 <= num_drafted <= most:
            raise ValueError(f"recycling:N drafts 1 to {most} tokens, got {num_drafted}")
        self.num_nodes = num_drafted + 1
        self.levels = self.depth = min(num_drafted, _LEVELS)
        self._shape = vocab_size, min(RANKS, vocab_size)
        self._kept: tuple[Tensor, Tensor] | None = None

    def propose(self, state: DecodingState) -> TokenTree:
        most = self.num_nodes - 1
        return best_first_tree(state.roots_B, self.guess(state), most, self.depth, DYNAMIC_WIDTH)

    def guess(self, state: DecodingState) -> Guess:
        """What the matrix says, in this step."""
        successors_VR, log_chances_VR = self._matrix(state.roots_B.device)
        noise, rows = state.noise, state.rows

        def successors(level: int, paths_BFJ: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            before_BF = paths_BFJ[:, :, -1]
            tokens_BFR, log_chances_BFR = successors_VR[before_BF], log_chances_VR[before_BF]
            if noise is not None:
                known_BFR = noise.of(rows, [level], tokens_BFR)
                log_chances_BFR = drawn_chances(log_chances_BFR, known_BFR)
            return tokens_BFR, log_chances_BFR + math.log(_PRIOR)

        return successors

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        successors_VR, log_chances_VR = self._matrix(logits_BNV.device)
        tokens_M, logits_MV = tree.tokens_BN.flatten().contiguous(), logits_BNV.flatten(0, 1)
        # All nodes of one token write what the last of them says: whose is written last, nobody
        # can tell of a device, nor of threads.
        last_M = _last_alike(tokens_M)
        best_MR, ids_MR = best(logits_MV, self._shape[1])
        log_chances_MR = _numbers(best_MR).log_softmax(dim=-1)[last_M]
        told_M1 = ~log_chances_MR[:, :1].isnan()
        successors_VR[tokens_M] = ids_MR[last_M].where(told_M1, successors_VR[tokens_M])
        log_chances_MR = log_chances_MR.clamp_min(LEAST)
        log_chances_VR[tokens_M] = log_chances_MR.where(told_M1, log_chances_VR[tokens_M])

    def _matrix(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of every token the successors, and how likely they were, [V, R] each."""
        if self._kept is None or self._kept[0].device != device:
            with torch.inference_mode(False):
                # Siblings differ, and of tokens that were never read they count for nothing.
                successors_VR = torch.arange(self._shape[1], device=device).repeat(
                    self._shape[0], 1
                )
                log_chances_VR = torch.full(self._shape, LEAST, dtype=torch.float, device=device)
            for kept in (successors_VR, log_chances_VR):
                torch._dynamo.mark_static_address(kept)
            self._kept = successors_VR, log_chances_VR
        return self._kept


def _last_alike(tokens_M: Tensor) -> Tensor:
    """Of each token the last place where it stands."""
    if tokens_M.is_cuda and len(tokens_M) <= _MOST_PAIRED:
        return _last_of_pairs(tokens_M)
    sorted_M, places_M = tokens_M.sort(stable=True)
    return places_M[torch.searchsorted(sorted_M, tokens_M, right=True) - 1]


def _last_of_pairs(tokens_M: Tensor) -> Tensor:
    """The same of all pairs at once, by fewer kernels: one where they are compiled."""
    places_M = torch.arange(len(tokens_M), device=tokens_M.device)
    return places_M.where(tokens_M[:, None] == tokens_M, 0).amax(dim=1)


def _numbers(best_MR: Tensor) -> Tensor:
    """Logits in float32; what is no number, and so comes before all others, as if never written."""
    best_MR = best_MR.float()
    return best_MR.masked_fill(best_MR.isnan(), -torch.inf)
