"""Drafts of several sources in one tree, of the size that pays at this very step.

Shapes: B active rows, N tree nodes (root included), V vocabulary.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from medusa_heads.inference.adapt.bandit import Allowance, Bandit
from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import Evidence
from medusa_heads.inference.drafters.base import Observer
from medusa_heads.inference.drafters.growing import Proposal, Source, grow
from medusa_heads.inference.drafters.text import TextSource
from medusa_heads.prefix_tree import PrefixTree, to_token_tree

if TYPE_CHECKING:
    from medusa_heads.inference.corpus_index import CorpusIndex
    from medusa_heads.inference.row import Row
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree

# Tokens that the text itself promises: from each bound on it is another situation.
_BOUNDS = (0.3, 0.8, 1.6, 3.2)
_TYPICAL = (0.1, 0.5, 1.2, 2.2, 5.0)


class BlendedDrafter:
    """What the text itself suggests, and what other sources offer.

    Before every step it is decided which sources are asked: none, one, or several, by what their
    steps gave and took where the text promised about as much. Of all that is offered those nodes
    are verified that are likeliest to be accepted, and as many as pay: a long chain where the text
    repeats itself, a bushy tree where it does not, none where drafts have been wrong of late.

    Args:
        clock: what steps take here.
        sizes: numbers of drafted nodes to choose from; 0 is plain decoding.
        text: what the text itself suggests; None for nothing.
        sources: whatever else may be asked.
        always: whether all sources are asked at every step.
        chain_only: never more than one token behind another.
    """

    def __init__(
        self,
        clock: Clock,
        sizes: Sequence[int],
        *,
        text: TextSource | None = None,
        sources: Sequence[Source] = (),
        always: bool = False,
        chain_only: bool = False,
    ) -> None:
        self._clock, self._sizes = clock, list(sizes)
        self._text, self._sources = text, list(sources)
        self._chain_only = chain_only
        everyone = (1 << len(self._sources)) - 1
        self._ways = [everyone] if always else list(range(everyone + 1))
        # What is learnt of greedy text says little of sampled text.
        self._situations: dict[tuple[bool, int], _Situation] = {}
        self._believed = {drawn: Evidence([1.0] * (everyone + 1)) for drawn in (True, False)}
        self._asked = everyone
        self._observing = self._observed = 0.0
        self._took: float | None = None
        self.reads_prompt = any(source.reads_prompt for source in self._sources)

    @property
    def num_nodes(self) -> int:
        """The most nodes that a proposed tree has, the root included."""
        return max(self._sizes) + 1

    def propose(self, state: DecodingState) -> TokenTree:
        """The likeliest nodes of all, for every active row."""
        started = time.perf_counter()
        self.learn(state)
        situation = self._situation(state)
        proposals, promised = self._from_text(state)
        place = bisect_right(_BOUNDS, promised)
        way = situation.pick(place)
        asked = self._ways[way]
        for i, source in enumerate(self._sources):
            if asked >> i & 1:
                for own, drafted in zip(proposals, source.draft(state), strict=True):
                    own.append(drafted)
        budget, least = situation.budget, situation.budget.least()
        trees = [
            PrefixTree(row.tokens[-1])
            if row.done
            else grow(row.tokens[-1], own, budget.most, least, chain_only=self._chain_only)
            for row, own in zip(state.rows, proposals, strict=True)
        ]
        belief = min(self._believed[situation.drawn].rate(asked), 1.0)
        expected = _mean([tree.expected() for tree in trees], belief)
        size = budget.best(expected)
        spare = budget.most + 1 if budget.fixed else 1
        drafts = to_token_tree(trees, state.roots_B.device, size, spare)
        seconds = time.perf_counter() - started
        active = [b for b, row in enumerate(state.rows) if not row.done]
        state.memories[self] = _Step(
            situation,
            way,
            place,
            [state.rows[b] for b in active],
            [proposals[b] for b in active],
            promised=expected[min(size, len(expected) - 1)] / max(belief, 1e-9),
            nodes=drafts.num_nodes,
            seconds=seconds,
        )
        self._asked, self._observing, self._took = asked, 0.0, None
        return drafts

    def learn(self, state: DecodingState) -> None:
        """Compare what was drafted last with what was committed since. Before the next proposal
        this is done anyway; whoever lets another drafter propose in between does it before that."""
        step: _Step | None = state.memories.pop(self, None)
        if step is None or not step.rows:
            return
        committed = [row.behind(before) for row, before in zip(step.rows, step.lengths, strict=True)]
        for own, tokens in zip(step.proposals, committed, strict=True):
            for proposal in own:
                proposal.learn(tokens)
        tokens = sum(map(len, committed)) / len(committed)
        situation, asked = step.situation, self._ways[step.way]
        if step.promised:
            self._believed[situation.drawn].learn(asked, tokens - 1.0, step.promised)
        verified = step.nodes * situation.rows
        drafting = f"{asked} of {situation.rows}"
        self._clock.learn_drafting(drafting, step.seconds + self._observing)
        if self._took is not None and len(state.rows) == len(step.rows):
            context = max(step.lengths)
            self._clock.learn(verified, max(self._took - self._observing, 1e-9), context)
        seconds = self._clock.step(verified) + self._clock.drafting(drafting)
        situation.learn(step.way, step.place, tokens, seconds)

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """See Observer."""
        started = time.perf_counter()
        for i, source in enumerate(self._sources):
            if self._asked >> i & 1 and isinstance(source, Observer):
                source.observe(tree, logits_BNV)
        self._observing = time.perf_counter() - started

    def took(self, nodes: int, seconds: float) -> None:
        """See Timed."""
        self._took = seconds

    def _from_text(self, state: DecodingState) -> tuple[list[list[Proposal]], float]:
        """What the text suggests for every row, and how many tokens of it to expect on average."""
        if self._text is None:
            return [[] for _ in state.rows], 0.0
        found = self._text.draft(state)
        best = [max(proposal.expected() for proposal in own) for own in found]
        return [list(own) for own in found], sum(best) / len(best)

    def _situation(self, state: DecodingState) -> _Situation:
        drawn, rows = state.warpers is not None, len(state.rows)
        group = rows.bit_length() if rows & (rows - 1) else rows.bit_length() - 1
        situation = self._situations.get((drawn, group))
        if situation is None:
            situation = _Situation(self._clock, self._sizes, drawn, rows, self._priors(rows))
            self._situations[drawn, group] = situation
        situation.move_to(rows)
        return situation

    def _priors(self, rows: int) -> list[list[tuple[float, float]]]:
        """Tokens and seconds to expect of a step, by what the text promises and who is asked."""
        priors = []
        for promised in _TYPICAL if self._text is not None else _TYPICAL[:1]:
            text = promised if self._text is not None else 0.0
            of_ways = []
            for asked in self._ways:
                known = [s for i, s in enumerate(self._sources) if asked >> i & 1]
                drafting = sum(self._clock.drafting(source.name) for source in known)
                best = (0.0, 1.0, 1.0)
                for size in self._sizes:
                    alone = max([min(text, size)] + [s.expected(size) for s in known])
                    # What several know is mostly the same.
                    both = alone + 0.15 * (len(known) + (text > 0) - 1) * alone
                    seconds = self._clock.step(rows * (size + 1)) + drafting
                    best = max(best, ((1.0 + both) / seconds, 1.0 + both, seconds))
                of_ways.append(best[1:])
            priors.append(of_ways)
        return priors


def text_drafter(most: int, corpus: CorpusIndex | None = None) -> BlendedDrafter:
    """Up to so many tokens that followed where the text last ended as it does now.

    Args:
        most: of them.
        corpus: continued as well as the text itself; None for none.
    """
    text = TextSource(most, corpus)
    return BlendedDrafter(Clock.flat(), range(most + 1), text=text, chain_only=True)


class _Situation:
    """Rows decoded together, drawn or not: what pays for them.

    Args:
        clock, sizes: see BlendedDrafter.
        drawn: whether the target's tokens are drawn.
        rows: how many.
        priors: of a step, by what the text promises and by who is asked.
    """

    def __init__(
        self,
        clock: Clock,
        sizes: Sequence[int],
        drawn: bool,
        rows: int,
        priors: Sequence[Sequence[tuple[float, float]]],
    ) -> None:
        self.drawn, self.rows = drawn, rows
        self._allowance = Allowance(clock.step(rows))
        self.budget = Budget(clock, sizes, rows, self._allowance)
        self._bandits = [Bandit(of_ways, self._allowance) for of_ways in priors]

    def move_to(self, rows: int) -> None:
        """So many rows are left."""
        self.rows = self.budget.rows = rows

    def pick(self, place: int) -> int:
        """Who is asked, where the text promises so much."""
        return self._bandits[min(place, len(self._bandits) - 1)].pick(self.budget.worth)

    def learn(self, way: int, place: int, tokens: float, seconds: float) -> None:
        """What a step gave each row, and took."""
        self._allowance.grow(seconds)
        self.budget.learn(tokens, seconds)
        self._bandits[min(place, len(self._bandits) - 1)].learn(way, tokens, seconds)


@dataclass
class _Step:
    """A step that was drafted for.

    Attributes:
        situation, way, place: what was decided, and where.
        rows: those that were active.
        proposals: what their sources offered.
        promised: drafted tokens of a row that were expected to be accepted, before any belief.
        nodes: verified in each row, the root and spare ones included.
        seconds: that drafting took.
        lengths: of the rows' texts by then.
    """

    situation: _Situation
    way: int
    place: int
    rows: list[Row]
    proposals: list[list[Proposal]]
    promised: float
    nodes: int
    seconds: float
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = [row.length for row in self.rows]


def _mean(expected: Sequence[Sequence[float]], belief: float) -> list[float]:
    """Tokens expected of a mean row by nodes; a shorter tree gains no more than all of it."""
    longest = max(map(len, expected))
    totals = [0.0] * longest
    for row in expected:
        for size in range(longest):
            totals[size] += row[min(size, len(row) - 1)]
    return [belief * total / len(expected) for total in totals]
