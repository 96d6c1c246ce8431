"""What heads offer for trees that are grown on the host: their own probabilities at every step.

Shapes: B active rows, K heads, R ranks, N nodes of a tree (root included).
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from medusa_heads.heads import DraftHeads
from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level, levels
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.coupling import as_drawn
from medusa_heads.inference.drafters.growing import Proposal, Source, by_drawing
from medusa_heads.inference.drafters.prefix import encoded_hidden
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.dynamic_tree import Ranking
from medusa_heads.trees.statistics import HeadStatistics

_RANKS = 10  # candidates of each head; deeper ones are verified in very few steps
_WEIGHT = 12.0  # probabilities were calibrated on held-out text
_NEGLIGIBLE = 0.004


class _HeadsOffers(Source):
    """What both ways to ask heads have in common; they were measured on held-out text, or a prior
    stands for that."""

    name = "heads"

    def __init__(self, statistics: HeadStatistics) -> None:
        self._statistics = statistics
        measured = json.dumps(statistics.to_dict(), sort_keys=True)
        self.facts = {"heads": hashlib.sha256(measured.encode()).hexdigest()}
        groups = statistics.num_heads * LEVELS
        self.evidence = by_drawing(lambda: Evidence([1.0] * groups, weight=_WEIGHT))

    def expected(self, nodes: int) -> float:
        if not nodes:
            return 0.0
        nodes = min(nodes, len(self._statistics.paths))
        return self._statistics.expected_tokens_per_step(nodes) - 1.0


class HeadsSource(_HeadsOffers):
    """Heads that do not see each other: one forward of all, a table of candidates."""

    def __init__(self, heads: DraftHeads, statistics: HeadStatistics) -> None:
        super().__init__(statistics)
        self._heads, self._ranking = heads, Ranking(heads, statistics.temperatures)
        self.reads_prompt = self.reads_on = heads.config.reads_text
        self._ranks = min(_RANKS, heads.config.num_candidates)

    def draft(self, state: DecodingState) -> list[Proposal]:
        """See Source. A place is a depth."""
        hidden_BD = encoded_hidden(self._heads, state)
        ranking = as_drawn(self._ranking, state)
        return self._offered(*ranking.best(self._heads(hidden_BD), self._ranks), state)

    def _offered(
        self, tokens_BKR: Tensor, log_probs_BKR: Tensor, state: DecodingState
    ) -> list[Proposal]:
        chances_BKR = log_probs_BKR.exp().cpu().numpy()
        firsts_K1 = LEVELS * np.arange(chances_BKR.shape[1])[:, None]
        tables = (tokens_BKR, chances_BKR, levels(chances_BKR) + firsts_K1)
        rows, evidence = zip(*(of.tolist() for of in tables), strict=True), self.evidence
        return [Proposal(evidence[state.drawing], 0, partial(_of_table, *row)) for row in rows]


def _of_table(
    tokens_KR: list[list[int]],
    chances_KR: list[list[float]],
    groups_KR: list[list[int]],
    place: int,
) -> list[tuple[int, float, int, Any]]:
    if place >= len(tokens_KR):
        return []
    each = zip(tokens_KR[place], chances_KR[place], groups_KR[place], strict=True)
    return [(*known, place + 1) for known in each if known[1] > _NEGLIGIBLE]


class TreeSource(_HeadsOffers):
    """A drafter's own trees, which carry draft probabilities, as offers."""

    def __init__(self, drafter: Drafter, statistics: HeadStatistics) -> None:
        super().__init__(statistics)
        self.drafter, self.reads_prompt = drafter, drafter.reads_prompt
        self.reads_on = drafter.reads_prompt

    def draft(self, state: DecodingState) -> list[Proposal]:
        """See Source. A place is a node."""
        tree = self.drafter.propose(state)
        assert tree.log_probs_BN is not None
        tensors = (tree.tokens_BN, tree.parents_BN, tree.depth_BN, tree.log_probs_BN.exp())
        rows = zip(*(each.tolist() for each in tensors), strict=True)
        evidence = self.evidence[state.drawing]
        return [Proposal(evidence, 0, _children(*row).__getitem__) for row in rows]


def _children(
    tokens: list[int], parents: list[int], depth: list[int], chances: list[float]
) -> list[list[tuple[int, float, int, Any]]]:
    """What is offered behind each node of a tree."""
    children: list[list[tuple[int, float, int, Any]]] = [[] for _ in tokens]
    for node in range(1, len(tokens)):
        group = LEVELS * (depth[node] - 1) + level(chances[node])
        children[parents[node]].append((tokens[node], chances[node], group, node))
    return children
