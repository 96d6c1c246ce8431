"""One step's drafts of a draft model as they grow, and what there is to be learnt from them.

All rows' trees have one shape. Nodes are numbered as they are drafted, level by level.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from medusa_heads.config import RankPath

if TYPE_CHECKING:
    from medusa_heads.inference.draft_costs import DraftCosts
    from medusa_heads.inference.drafters.draft_trust import DraftTrust
    from medusa_heads.inference.row import Row

_MOST_READ = 8  # nodes of a level that the draft model goes on behind


class _Node(NamedTuple):
    """A drafted token.

    Attributes:
        rank: whether it is its parent's first, second, .. token.
        sureness: of the draft model before, by row.
        chances: that it is accepted together with all before it, by row.
        chance: their mean.
    """

    rank: int
    sureness: Sequence[float]
    chances: Sequence[float]
    chance: float


class DraftedTree:
    """What is drafted in one step.

    Args:
        rows: drafted for.

    Attributes:
        paths: of ranks, of each node; the root's is empty.
        levels: of drafted tokens.
        read: nodes whose next tokens the draft model is asked for now.
        read_below: behind which of those that it was asked for before they stand, by place.
        tokens_BN: of all nodes, once they are drafted.
    """

    tokens_BN: Tensor

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows, self._lengths = list(rows), [row.length for row in rows]
        self._nodes = [_Node(0, (), [1.0] * len(rows), 1.0)]
        self._children: list[list[int]] = [[]]
        self.paths: list[RankPath] = [()]
        self.levels = 0
        self.read, self.read_below = [0], [0]
        self._forwards = self._beside = 0

    @property
    def chance(self) -> float:
        """That one of the nodes to be read is accepted, in the mean row."""
        return sum(self._nodes[node].chance for node in self.read)

    @property
    def num_drafted(self) -> int:
        """Nodes besides the root."""
        return len(self._nodes) - 1

    def grow(
        self, trust: DraftTrust, sureness: Sequence[Sequence[Sequence[float]]]
    ) -> tuple[list[int], list[int]]:
        """Add the tokens behind the nodes just read that are worth their verification.

        Args:
            trust: knows what they are worth.
            sureness: of the draft model, by row, node that was read, and rank; below 0 of a token
                that cannot be.

        Returns:
            Behind which of the nodes that were read each new one stands, by place, and its rank.
        """
        self._forwards += 1
        self._beside += len(self.read) - 1
        chance_of_all = max(self.chance, 1e-9)
        offers = [
            self._offers(trust, node, [of_row[place] for of_row in sureness], chance_of_all)
            for place, node in enumerate(self.read)
        ]
        taken, promised = [0] * len(self.read), 0.0
        while True:
            # The likeliest of all; behind one node, in the order in which they are tried.
            following = [
                (offer[count].chance, place)
                for place, (offer, count) in enumerate(zip(offers, taken, strict=True))
                if count < len(offer)
            ]
            if not following:
                break
            chance, place = max(following)
            nodes = self.num_drafted + sum(taken)
            if not trust.worth_verifying(self.levels, chance, nodes=nodes, promised=promised):
                break
            promised += chance
            taken[place] += 1
        places = [place for place, count in enumerate(taken) for _ in range(count)]
        ranks = [rank for count in taken for rank in range(count)]
        for place, rank in zip(places, ranks, strict=True):
            parent = self.read[place]
            self._children[parent].append(len(self._nodes))
            self.paths.append((*self.paths[parent], rank))
            self._nodes.append(offers[place][rank])
            self._children.append([])
        self.levels += bool(ranks)
        return places, ranks

    def read_on(self, trust: DraftTrust) -> list[int]:
        """Choose which of the newest nodes to read next; returns their places among those."""
        newest = [node for node, path in enumerate(self.paths) if len(path) == self.levels]
        chances = {node: self._nodes[node].chance for node in newest}
        likeliest = sorted(newest, key=lambda node: -chances[node])[:_MOST_READ]
        before = {self.paths[node]: place for place, node in enumerate(self.read)}
        nodes = self.num_drafted
        self.read = sorted(
            node
            for place, node in enumerate(likeliest)
            if not place or trust.worth_reading_beside(nodes, chances[node])
        )
        self.read_below = [before[self.paths[node][:-1]] for node in self.read]
        return [node - newest[0] for node in self.read]

    def teach(self, trust: DraftTrust, costs: DraftCosts) -> None:
        """Compare with what was committed since."""
        rows = zip(self._rows, self._lengths, self.tokens_BN.tolist(), strict=True)
        gained = []
        for b, (row, length, tokens) in enumerate(rows):
            committed, node = row.behind(length), 0
            gained.append(len(committed))
            for true in committed:
                parent = node
                for child in self._children[parent]:
                    right = tokens[child] == true
                    trust.learn(self._nodes[child].rank, self._nodes[child].sureness[b], right)
                    if right:
                        node = child
                        break
                if node == parent:
                    break
        seconds = costs.seconds(self.num_drafted, self._forwards, self._beside)
        trust.learn_step(fmean(gained), seconds)

    def _offers(
        self,
        trust: DraftTrust,
        node: int,
        sureness: Sequence[Sequence[float]],
        chance_of_all: float,
    ) -> list[_Node]:
        """What could stand behind a node, in every row."""
        above = self._nodes[node]
        weight = above.chance / chance_of_all / len(self._rows)
        by_row = [trust.chances(of_row, weight) for of_row in sureness]
        offers = []
        for rank in range(trust.ranks):
            of_rank = [of_row[rank] for of_row in sureness]
            if min(of_rank) < 0:
                break
            chances = [
                before * of_row[rank] for before, of_row in zip(above.chances, by_row, strict=True)
            ]
            offers.append(_Node(rank, of_rank, chances, fmean(chances)))
        return offers
