"""One step's drafts of a draft model as they grow, and what there is to be learnt from them.

All rows' trees have one shape. Nodes are numbered as they are drafted, level by level.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from torch import Tensor

from medusa_heads.config import RankPath
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level
from medusa_heads.inference.drafters.base import Memory
from medusa_heads.inference.drafters.model.choice import DraftChoice
from medusa_heads.inference.engine.rows import Row

# Of tokens that the draft model is so sure of, that they are accepted; by level.
_PRIOR = (0.01, 0.04, 0.08, 0.15, 0.28, 0.42, 0.58, 0.72, 0.85, 0.93, 0.98)
_BESIDE = (0.3, 0.2, 0.12)  # no second, third, .. token is believed more at first
MOST_RANKS = 1 + len(_BESIDE)  # behind a node; a fifth would be accepted in very few steps
_MEMORY = 64.0  # drafts: texts change, and so do their passages
_MOST_READ = 8  # nodes of a level that the draft model goes on behind
_DEEPEST = 16


class Experience:
    """What a draft model's tokens came to.

    Attributes:
        tokens: how often they were accepted, behind an accepted token whose others are wrong; by
            rank and by how sure the draft model was.
        further: accepted tokens that another level promised, over the chance that the token before
            it was accepted; by how sure the draft model was of that one.
    """

    def __init__(self) -> None:
        beside = [min(chance, most) for most in _BESIDE for chance in _PRIOR]
        self.tokens = Evidence([*_PRIOR, *beside], memory=_MEMORY)
        # Where it is sure of a token it is often sure of the next one.
        self.further = Evidence([0.3 + 0.6 * chance for chance in _PRIOR], memory=_MEMORY)


class _Node(NamedTuple):
    """A drafted token."""

    groups: Sequence[int]  # of evidence, that it belongs to, by row
    sureness: float  # of the draft model before, in the mean row
    chances: Sequence[float]  # that it is accepted together with all before it, by row
    chance: float  # their mean


class DraftedTree(Memory):
    """What is drafted in one step, by experience with such drafts, a choice that knows what they
    are worth, and the clock of the draft model's forwards.

    Attributes:
        paths: of ranks, of each node; the root's is empty.
        levels: of drafted tokens.
        read: nodes whose next tokens the draft model is asked for now.
        read_below: behind which of those that it was asked for before they stand, by place.
        tokens_BN: of all nodes, once they are drafted.
    """

    tokens_BN: Tensor

    def __init__(
        self, rows: Sequence[Row], experience: Experience, choice: DraftChoice, clock: Clock
    ) -> None:
        super().__init__(rows)
        self._experience, self._choice = experience, choice
        # Of verifying 0, 1, 2, .. nodes, and of reading so many at once.
        self._verifying = _rising(map(choice.budget.seconds, range(choice.budget.most + 1)))
        reading = [clock.step(len(rows) * count) for count in range(1, _MOST_READ + 1)]
        # One node is what is read most: of that the clock knows most.
        self._reading = [0.0, *accumulate(reading, max)]
        self._nodes = [_Node((), 1.0, [1.0] * len(rows), 1.0)]
        self._children: list[list[int]] = [[]]
        self.paths: list[RankPath] = [()]
        self.levels = 0
        self.read, self.read_below = [0], [0]

    def grow(self, sureness: Sequence[Sequence[Sequence[float]]]) -> tuple[list[int], list[int]]:
        """Add the tokens behind the nodes just read that are worth their verification. By row, node
        and rank the draft model was so sure; below 0 of a token that cannot be. Returns behind
        which of the nodes that were read each new one stands, by place, and its rank."""
        offers = [
            self._offers(self._nodes[node], [of_row[place] for of_row in sureness])
            for place, node in enumerate(self.read)
        ]
        taken = [0] * len(self.read)
        for place in self._worth_verifying(offers):
            taken[place] += 1
        for place, node in enumerate(self.read if self.levels else ()):
            promised = sum(offer.chance for offer in offers[place][: taken[place]])
            group, chance = level(self._nodes[node].sureness), self._nodes[node].chance
            self._experience.further.learn(group, promised, chance)
        added = [(place, rank) for place, count in enumerate(taken) for rank in range(count)]
        for place, rank in added:
            parent = self.read[place]
            self._children[parent].append(len(self._nodes))
            self.paths.append((*self.paths[parent], rank))
            self._nodes.append(offers[place][rank])
            self._children.append([])
        self.levels += bool(added)
        return [place for place, _ in added], [rank for _, rank in added]

    def read_on(self) -> list[int]:
        """Choose which of the newest nodes to read next, if any; returns their places among those.
        Where all that one more level promises is worth less than its seconds, so is every level
        behind it: what is accepted never becomes likelier."""
        newest = [node for node, path in enumerate(self.paths) if len(path) == self.levels]
        further, budget = self._experience.further, self._choice.budget
        gains = {
            node: self._nodes[node].chance * further.rate(level(self._nodes[node].sureness))
            for node in newest
        }
        likeliest = sorted(newest, key=lambda node: -gains[node])[:_MOST_READ]
        drafted = len(self._nodes) - 1
        likeliest = likeliest[: budget.most - drafted if self.levels < _DEEPEST else 0]
        seconds = [
            self._reading[count] + self._verifying[drafted + count]
            for count in range(len(likeliest) + 1)
        ]
        count = budget.taken([gains[node] for node in likeliest], seconds)
        before = {self.paths[node]: place for place, node in enumerate(self.read)}
        self.read = sorted(likeliest[:count])
        self.read_below = [before[self.paths[node][:-1]] for node in self.read]
        return [node - newest[0] for node in self.read]

    def learn(self) -> None:
        """Compare with what was committed since."""
        for b, (committed, tokens) in enumerate(
            zip(self.committed(), self.tokens_BN.tolist(), strict=True)
        ):
            node: int | None = 0
            for true in committed:
                if node is None:
                    break
                children, node = self._children[node], None
                for child in children:
                    right = tokens[child] == true
                    self._experience.tokens.learn(self._nodes[child].groups[b], float(right))
                    if right:
                        node = child
                        break

    def _worth_verifying(self, offers: Sequence[Sequence[_Node]]) -> list[int]:
        """Places of nodes behind which a token pays, once for each token; behind one node they
        come in the order in which they are tried."""
        budget, drafted = self._choice.budget, len(self._nodes) - 1
        waiting = [(-own[0].chance, place, 0) for place, own in enumerate(offers) if own]
        heapq.heapify(waiting)
        # Deeper levels need room too, where verification is nearly free.
        left = max(-(-(budget.most - drafted) // 3), 0)
        places: list[int] = []
        chances: list[float] = []
        while waiting and len(places) < left:
            negated, place, rank = heapq.heappop(waiting)
            places.append(place)
            chances.append(-negated)
            if rank + 1 < len(offers[place]):
                heapq.heappush(waiting, (-offers[place][rank + 1].chance, place, rank + 1))
        seconds = self._verifying[drafted : drafted + len(places) + 1]
        count = budget.taken(chances, seconds)
        if places and not count and not drafted:
            # Without a trial of the first token nobody would learn that it pays by now.
            loss = seconds[1] - seconds[0] - chances[0] / budget.worth
            count = int(self._choice.allowance.pay(loss))
        return places[:count]

    def _offers(self, above: _Node, sureness: Sequence[Sequence[float]]) -> list[_Node]:
        """What could stand behind a node, by rank; how sure the draft model is, by row and rank."""
        offers = []
        open_ = list(above.chances)
        for rank, of_rank in enumerate(zip(*sureness, strict=True)):
            if min(of_rank) < 0:
                break
            groups = [rank * LEVELS + level(sure) for sure in of_rank]
            rates = [self._experience.tokens.rate(group) for group in groups]
            chances = [chance * rate for chance, rate in zip(open_, rates, strict=True)]
            open_ = [chance * (1 - rate) for chance, rate in zip(open_, rates, strict=True)]
            offers.append(_Node(groups, fmean(of_rank), chances, fmean(chances)))
        return offers


def _rising(seconds: Iterable[float]) -> list[float]:
    """Less never takes longer. Where it is said to, something else ran meanwhile, or more has been
    done since: the lower figure is right."""
    return list(accumulate(reversed(list(seconds)), min))[::-1]
