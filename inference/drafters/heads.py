"""What heads offer for trees that are grown on the host: their own probabilities at every step.

Shapes: B active rows, K heads, R ranks, N nodes of a tree (root included).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from medusa_heads.heads import DraftHeads
from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level
from medusa_heads.inference.drafters.growing import Proposal
from medusa_heads.inference.drafters.prefix import encoded_hidden
from medusa_heads.trees.guesses import candidates
from medusa_heads.trees.statistics import HeadStatistics

if TYPE_CHECKING:
    from medusa_heads.inference.drafters.base import Drafter
    from medusa_heads.inference.engine.state import DecodingState

_RANKS = 10  # candidates of each head; deeper ones are verified in very few steps
_WEIGHT = 12.0  # probabilities were calibrated on held-out text
_NEGLIGIBLE = 0.004


class TableProposal(Proposal):
    """Candidates of heads that do not see each other. A place is a depth."""

    def __init__(
        self,
        evidence: Evidence,
        tokens_KR: Sequence[Sequence[int]],
        chances_KR: Sequence[Sequence[float]],
    ) -> None:
        super().__init__(evidence, 0)
        self._tokens_KR, self._chances_KR = tokens_KR, chances_KR

    def _behind(self, place: Hashable) -> list[tuple[int, float, int, Hashable]]:
        assert isinstance(place, int)
        if place >= len(self._tokens_KR):
            return []
        return [
            (token, chance, LEVELS * place + level(chance), place + 1)
            for token, chance in zip(self._tokens_KR[place], self._chances_KR[place], strict=True)
            if chance > _NEGLIGIBLE
        ]


class HeadsSource:
    """Heads that do not see each other: one forward of all, a table of candidates.

    Args:
        heads: on their target's device.
        statistics: measured on held-out text, or a prior.
    """

    name = "heads"

    def __init__(self, heads: DraftHeads, statistics: HeadStatistics) -> None:
        self._heads, self._statistics = heads, statistics
        self.reads_prompt = heads.config.prefix_attention
        self._ranks = min(_RANKS, heads.config.num_candidates)
        self._evidence = _evidence(heads.config.num_heads)

    def draft(self, state: DecodingState) -> list[TableProposal]:
        """See Source."""
        hidden_BD = encoded_hidden(self._heads, state)
        tokens_BKR, log_probs_BKR = candidates(
            self._heads, hidden_BD, self._ranks, self._statistics.temperatures
        )
        tables = zip(tokens_BKR.tolist(), log_probs_BKR.exp().tolist(), strict=True)
        evidence = self._evidence[state.warpers is not None]
        return [TableProposal(evidence, tokens, chances) for tokens, chances in tables]

    def expected(self, nodes: int) -> float:
        """See Source."""
        return expected_accepted(self._statistics, nodes)


class TreeProposal(Proposal):
    """The nodes of a tree that was drafted as a whole. A place is a node."""

    def __init__(
        self,
        evidence: Evidence,
        tokens: Sequence[int],
        parents: Sequence[int],
        depth: Sequence[int],
        chances: Sequence[float],
    ) -> None:
        super().__init__(evidence, 0)
        self._tokens, self._depth, self._chances = tokens, depth, chances
        self._children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents):
            if parent >= 0:
                self._children[parent].append(node)

    def _behind(self, place: Hashable) -> list[tuple[int, float, int, Hashable]]:
        assert isinstance(place, int)
        return [
            (
                self._tokens[node],
                self._chances[node],
                LEVELS * (self._depth[node] - 1) + level(self._chances[node]),
                node,
            )
            for node in self._children[place]
        ]


class TreeSource:
    """A drafter's own trees, as offers.

    Args:
        drafter: its trees carry draft probabilities, unless `chances` stand for them.
        depth: of its deepest tree.
        chances: of a drafter whose trees always look alike: for each node but the root, the chance
            that it is accepted where its parent is.
        statistics: say what its trees are worth; None where nothing does.
    """

    name = "heads"

    def __init__(
        self,
        drafter: Drafter,
        depth: int,
        chances: Sequence[float] | None = None,
        statistics: HeadStatistics | None = None,
    ) -> None:
        self.drafter, self.reads_prompt = drafter, drafter.reads_prompt
        self._chances, self._statistics = chances, statistics
        self._evidence = _evidence(depth)

    def draft(self, state: DecodingState) -> list[TreeProposal]:
        """See Source."""
        drafted = self.drafter.propose(state)
        if self._chances is not None:
            chances_BN = [[1.0, *self._chances]] * len(drafted.tokens_BN)
        else:
            assert drafted.log_probs_BN is not None
            chances_BN = drafted.log_probs_BN.exp().tolist()
        rows = zip(
            drafted.tokens_BN.tolist(),
            drafted.parents_BN.tolist(),
            drafted.depth_BN.tolist(),
            chances_BN,
            strict=True,
        )
        evidence = self._evidence[state.warpers is not None]
        return [TreeProposal(evidence, *row) for row in rows]

    def expected(self, nodes: int) -> float:
        """See Source."""
        if self._statistics is None:
            return nodes / (nodes + 3.0)
        return expected_accepted(self._statistics, nodes)


def expected_accepted(statistics: HeadStatistics, nodes: int) -> float:
    """Tokens of the best tree of so many nodes that are accepted at a random position."""
    if not nodes:
        return 0.0
    return statistics.expected_tokens_per_step(min(nodes, len(statistics.paths))) - 1.0


def _evidence(depth: int) -> dict[bool, Evidence]:
    """Of tokens that the target chooses, and of those that it draws."""
    return {drawn: Evidence([1.0] * (depth * LEVELS), weight=_WEIGHT) for drawn in (False, True)}
