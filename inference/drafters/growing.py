"""Trees that grow likeliest node first, from what several sources offer behind each node."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, TypeVar

from torch import Tensor

from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level
from medusa_heads.inference.engine.state import DecodingState, Drawing
from medusa_heads.trees.prefix_tree import PrefixTree
from medusa_heads.trees.tree import TokenTree

_SUREST = 0.999  # no draft is certain
_LEAST = 0.008  # a chance below which nothing is learnt of tokens where several sources speak
_Of = TypeVar("_Of")
_chance_of = itemgetter(0)

# What a source says behind a place: tokens, what it says of each, the group of evidence that each
# belongs to, and the places behind them. Places are whatever the source names them by.
Behind = Callable[[Any], list[tuple[int, float, int, Any]]]
# The chance that a token is accepted there, by what the source's drafts came to; its id; the place
# behind it; its group; what the source itself says of it. A plain tuple: hundreds are made in
# every step.
Offer = tuple[float, int, Any, int, float]


# Who goes on behind a node, and the place where each does.
_Places = Sequence[tuple["Proposal", Any]]


@dataclass(eq=False)
class Proposal:
    """What one source offers for one row in one step."""

    evidence: Evidence  # of the source; says how far it can be believed
    root: Any  # place of the last committed token
    behind: Behind  # what the source says
    # The offers behind places that were asked for; one for several rows, where they agree.
    known: dict[Any, list[Offer]] = field(default_factory=dict)

    def offers(self, place: Any) -> list[Offer]:
        """The tokens behind a place, likeliest first."""
        known = self.known.get(place)
        if known is None:
            known = self.known[place] = self._offers(place)
            known.sort(reverse=True)
        return known

    def _offers(self, place: Any) -> list[Offer]:
        """By what came of the source's drafts."""
        accepted, counted = self.evidence.columns  # of which `rate` is made, without a call each
        return [
            (
                min(expected * (accepted[group] / counted[group]), _SUREST),
                token,
                after,
                group,
                expected,
            )
            for token, expected, group, after in self.behind(place)
            if expected >= 0.0  # what is no number would make none of all that is learnt
        ]

    def learn(self, committed: Sequence[int]) -> None:
        """Compare with what the target wrote, as far as the source was right."""
        place: Any = self.root
        for true in committed:
            if place is None:
                return
            place = self.learn_at(place, true)

    def learn_at(self, place: Any, true: int) -> Any:
        """Compare with the token that came there. Returns the place behind it; None where the
        source did not offer it."""
        drafts, behind = [], None
        for _, token, after, group, expected in self.offers(place):
            right = token == true
            drafts.append((group, float(right), expected))
            if right:
                behind = after
        self.evidence.learn_all(drafts)
        return behind


class Source(ABC):
    """Drafts for every row, step by step."""

    name: str
    evidence: Mapping[Any, Evidence] = {}  # by how the target's tokens come about
    facts: Mapping[str, Any] = {}  # what its evidence is of, besides the target
    reads_prompt = False  # whether the first drafts need the hidden states of the whole prompt
    reads_on = False  # whether it reads all of the text, also what came while it was not asked
    observes = False  # whether it learns from what the target says

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


class Agreement:
    """What comes of tokens where several sources speak at once.

    Independent sources that agree would be right more often than either. Sources that know the same
    noise are not independent, and one that others contradict is right less often than where it
    speaks alone. So each place teaches either the one source that speaks there, or this.

    Attributes:
        evidence: accepted over what independent sources promise: of tokens that one of several
            sources offers, then of those that more than one does.
    """

    def __init__(self) -> None:
        self.evidence = Evidence([1.0] * (2 * LEVELS))

    def pooled(self, places: _Places, floor: float) -> list[tuple[float, int, _Places]]:
        """Of each token behind these places its chance, its id, and who goes on behind it; without
        offers of a smaller chance than the floor."""
        accepted, counted = self.evidence.columns
        found: list[tuple[float, int, _Places]] = []
        for token, (own, afters) in _merged(places, floor).items():
            group = _group(own, afters)
            found.append((min(own * (accepted[group] / counted[group]), _SUREST), token, afters))
        return found

    def learn(self, proposals: Sequence[Proposal], committed: Sequence[int]) -> None:
        """Compare with what the target wrote, as far as any of them was right."""
        places: _Places = [(proposal, proposal.root) for proposal in proposals]
        for true in committed:
            places = _speaking(places)
            if not places:
                return
            if len(places) == 1:
                ((proposal, place),) = places
                behind = proposal.learn_at(place, true)
                places = () if behind is None else ((proposal, behind),)
                continue
            merged = _merged(places, _LEAST)
            self.evidence.learn_all(
                (_group(own, afters), float(token == true), own)
                for token, (own, afters) in merged.items()
            )
            places = merged[true][1] if true in merged else ()


def _speaking(places: _Places) -> _Places:
    """Those behind which something is offered."""
    return [(proposal, place) for proposal, place in places if proposal.offers(place)]


def _group(chance: float, afters: _Places) -> int:
    return level(chance) + LEVELS * (len(afters) > 1)


def _merged(places: _Places, floor: float) -> dict[int, tuple[float, list[tuple[Proposal, Any]]]]:
    """Of each token the chance that one of its sources is right, as if they were independent, and
    who goes on behind it."""
    merged: dict[int, tuple[float, list[tuple[Proposal, Any]]]] = {}
    for proposal, place in places:
        for own, token, after, _, _ in proposal.offers(place):
            if own < floor:
                break
            known = merged.get(token)
            if known is None:
                merged[token] = (own, [(proposal, after)])
            else:
                known[1].append((proposal, after))
                merged[token] = (own + known[0] - own * known[0], known[1])
    return merged


class Growing:
    """A row's tree that grows node by node: always the likeliest of all that is offered behind its
    nodes so far.

    Where several sources offer the same token it is one node, and the tree goes on behind it with
    all of them.

    Args:
        root: the last committed token.
        most: nodes besides the root, at most.
        least: no node has a smaller chance.
        chain_only: never more than one node behind another.
        further: see PrefixTree.
        agreement: what came of tokens where several sources spoke at once; None where nothing is
            known of that.
    """

    def __init__(
        self,
        root: int,
        proposals: Sequence[Proposal],
        most: int,
        least: float = 0.0,
        *,
        chain_only: bool = False,
        further: float = 1.0,
        agreement: Agreement | None = None,
    ) -> None:
        self.tree = PrefixTree(root, further)
        self._most, self._least, self._chain_only = most, least, chain_only
        self._agreement = agreement or Agreement()
        # By chance, and the one that was found first of those that are equally likely.
        self._waiting: list[tuple[float, int, int, int, _Places]] = []
        self._found = 0
        if most > 0:
            self._look_behind(0, 1.0, [(proposal, proposal.root) for proposal in proposals])

    @property
    def next(self) -> float:
        """The chance of the node that would be added next; 0 where there is none."""
        return -self._waiting[0][0] if self._waiting else 0.0

    def to(self, nodes: int) -> None:
        """Have so many nodes besides the root, or all that there are."""
        tree, waiting = self.tree, self._waiting
        nodes = min(nodes, self._most)
        while waiting and len(tree.tokens) <= nodes:
            negated, _, parent, token, places = heappop(waiting)
            node = tree.add(parent, token, -negated)
            if node < self._most:
                self._look_behind(node, -negated, places)
            else:
                waiting.clear()

    def _look_behind(self, node: int, chance: float, places: _Places) -> None:
        floor, total = self._least / chance, 0.0
        found: list[tuple[float, int, _Places]] = []
        places = _speaking(places)
        if len(places) == 1:
            ((proposal, place),) = places
            for own, token, after, _, _ in proposal.offers(place):
                if own < floor:
                    break
                found.append((own, token, ((proposal, after),)))
                total += own
        elif places:
            found = self._agreement.pooled(places, floor)
            total = math.fsum(own for own, _, _ in found)
        if self._chain_only and found:
            found = [max(found, key=_chance_of)]
        scale = chance if total <= 1.0 else chance / total
        for own, token, afters in found:
            self._found += 1
            heappush(self._waiting, (-own * scale, self._found, node, token, afters))
