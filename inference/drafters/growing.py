"""Trees that grow likeliest node first, from what several sources offer behind each node."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from medusa_heads.inference.adapt.evidence import Evidence
from medusa_heads.inference.engine.state import DecodingState, Drawing
from medusa_heads.trees.prefix_tree import PrefixTree
from medusa_heads.trees.tree import TokenTree

_SUREST = 0.999  # no draft is certain
_Of = TypeVar("_Of")

# What a source says behind a place: tokens, what it says of each, the group of evidence that each
# belongs to, and the places behind them. Places are whatever the source names them by.
Behind = Callable[[Any], list[tuple[int, float, int, Any]]]
# The chance that a token is accepted there, by what the source's drafts came to; its id; the place
# behind it; its group; what the source itself says of it. A plain tuple: hundreds are made in
# every step.
Offer = tuple[float, int, Any, int, float]


@dataclass(eq=False)
class Proposal:
    """What one source offers for one row in one step."""

    evidence: Evidence  # of the source; says how far it can be believed
    root: Any  # place of the last committed token
    behind: Behind  # what the source says
    _known: dict[Any, list[Offer]] = field(default_factory=dict, init=False)

    def offers(self, place: Any) -> list[Offer]:
        """The tokens behind a place, likeliest first."""
        known = self._known.get(place)
        if known is None:
            rate = self.evidence.rate
            known = self._known[place] = [
                (self._chance(place, token, expected * rate(group)), token, after, group, expected)
                for token, expected, group, after in self.behind(place)
            ]
            known.sort(reverse=True)
        return known

    def _chance(self, place: Any, token: int, chance: float) -> float:
        """That the token is accepted there, by what came of the source's drafts."""
        return min(chance, _SUREST)

    def learn(self, committed: Sequence[int]) -> None:
        """Compare with what the target wrote, as far as the source was right."""
        place: Any = self.root
        for true in committed:
            if place is None:
                return
            offered, place = self.offers(place), None
            for _, token, after, group, expected in offered:
                right = token == true
                self.evidence.learn(group, float(right), expected)
                if right:
                    place = after


class Source(ABC):
    """Drafts for every row, step by step.

    Attributes:
        reads_prompt: whether the first drafts need the hidden states of the whole prompt.
        reads_on: whether it reads all of the text, also what was written while it was not asked.
        observes: whether it learns from what the target says.
        evidence: by how the target's tokens come about.
        facts: what its evidence is of, besides the target.
    """

    name: str
    evidence: Mapping[Any, Evidence] = {}
    facts: Mapping[str, Any] = {}
    reads_prompt = reads_on = False
    observes = False

    @abstractmethod
    def draft(self, state: DecodingState) -> Sequence[Proposal]:
        """What may follow each active row."""

    @abstractmethod
    def expected(self, nodes: int) -> float:
        """How many tokens of so many nodes are accepted, before anything was decoded."""

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:  # noqa: B027
        """See Drafter."""


def by_drawing(make: Callable[[], _Of]) -> dict[Drawing, _Of]:
    """What is known of tokens that come about in each way."""
    return {"greedy": make(), "drawn": make(), "keyed": make()}


def grow(
    root: int,
    proposals: Sequence[Proposal],
    most: int,
    least: float = 0.0,
    *,
    chain_only: bool = False,
) -> PrefixTree:
    """The likeliest nodes of all that is offered, in the order of their chances.

    Where several sources offer the same token it is one node, and the tree goes on behind it with
    all of them. There are at `most` so many nodes besides the root, none below the `least` chance.
    """
    tree = PrefixTree(root)
    waiting: list[tuple[float, int, int, int, dict[int, Any]]] = []
    node, chance, serial = 0, 1.0, 0
    places: dict[int, Any] = {i: proposal.root for i, proposal in enumerate(proposals)}
    while len(tree) <= most:
        found: dict[int, tuple[float, dict[int, Any]]] = {}
        floor = least / chance
        total = 0.0
        for i, place in places.items():
            for own, token, after, _, _ in proposals[i].offers(place):
                if own < floor:
                    break
                known = found.get(token)
                if known is None:
                    found[token] = (own, {i: after})
                    total += own
                else:  # independent sources that agree are right more often
                    both = own + known[0] - own * known[0]
                    total += both - known[0]
                    known[1][i] = after
                    found[token] = (both, known[1])
        scale = chance if total <= 1.0 else chance / total
        if chain_only and found:
            likeliest = max(found, key=lambda token: found[token][0])
            found = {likeliest: found[likeliest]}
        for token, (own, afters) in found.items():
            serial += 1
            heapq.heappush(waiting, (-own * scale, serial, node, token, afters))
        if not waiting:
            break
        negated, _, parent, token, places = heapq.heappop(waiting)
        chance = -negated
        node = tree.add(parent, token, chance)
    return tree
