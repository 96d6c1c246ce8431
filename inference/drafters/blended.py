"""Drafts of several kinds in one tree, of the size that pays at this very step.

Shapes: B active rows, N tree nodes (root included), V vocabulary.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch import Tensor

from medusa_heads.inference.drafters.suffix_memory import SuffixMemory, SuffixSources
from medusa_heads.inference.drafters.trust import Belief
from medusa_heads.inference.drafters.trusted import TrustedGrower
from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from medusa_heads.inference.corpus_index import CorpusIndex
    from medusa_heads.inference.drafters.growing import Grower
    from medusa_heads.inference.row import Row
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree


_LONGEST_REST = 31  # steps


class BlendedDrafter:
    """What the text itself suggests, what a cheap grower does, and what a costly one does.

    Of all their nodes those are verified that are likeliest to be accepted, and as many as pay: a
    long chain where the text repeats itself, a bushy tree where it does not, little where drafts
    have been wrong of late. Where the others promise more by themselves than what the costly one
    could add is worth, that one is not asked.

    Args:
        costly: a grower that takes time, such as heads; None for none.
        costs: what steps of each size cost here.
        cheap: a grower that takes next to none.
        suffix: whether the continuation of each row's longest suffix is drafted.
        corpus: whose continuation of it is drafted as well; None for none.
    """

    def __init__(
        self,
        costly: Grower | None,
        costs: StepCosts,
        *,
        cheap: Grower | None = None,
        suffix: bool = True,
        corpus: CorpusIndex | None = None,
    ) -> None:
        assert suffix or corpus is None
        self._costly = TrustedGrower(costly) if costly is not None else None
        self._cheap = TrustedGrower(cheap) if cheap is not None else None
        self._costs = costs
        self._sources = SuffixSources(corpus) if suffix else None
        # Several drafters may contradict each other, and promise too much together: of what is
        # known without the costly one, of all that is known, and of that before it is known.
        self._alone, self._together, self._ahead = Belief(), Belief(), Belief()
        self._rest = Rest()
        self.reads_prompt = any(grower.reads_prompt for grower in self._growers())

    @property
    def num_nodes(self) -> int:
        """The most nodes that a proposed tree has, the root included."""
        return self._costs.most + 1

    def propose(self, state: DecodingState) -> TokenTree:
        """The likeliest nodes of all, for every active row."""
        started = time.perf_counter()
        memory = state.memories.get(self)
        if memory is None:
            memory = state.memories[self] = _Memory(self._sources, self._costs.most)
        self.learn(state)
        if self._rest.goes_on():
            return self._costs.nothing(state.roots_B)
        trees = self._cheap_trees(state, memory)
        asked, expected = self._worth_asking(trees)
        if asked:
            assert self._costly is not None
            for tree, drafted in zip(
                trees, self._costly.grow(state, self._costs.usual), strict=True
            ):
                tree.merge(drafted)
        elif self._costly is not None:
            self._costly.forgive()
            self._ahead.forgive()
        belief = self._together if asked else self._alone
        drafts, promised = self._costs.cut(
            trees, state.roots_B.device, asked=asked, belief=belief.factor
        )
        if asked:
            self._costs.learn_drafting(time.perf_counter() - started)
            memory.promise(state, self._ahead, expected)
        if promised:
            memory.promise(state, belief, promised)
        else:
            belief.forgive()
        self._rest.after(drafted=promised > 0)
        return drafts

    def learn(self, state: DecodingState) -> None:
        """Compare what was drafted last with what was committed since. Before the next proposal
        this is done anyway; whoever lets another drafter propose in between does it before that."""
        memory: _Memory | None = state.memories.get(self)
        if memory is not None:
            memory.keep_promises()
        for grower in self._growers():
            grower.learn(state)

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """See Observer."""
        if self._rest.now:
            return
        for grower in self._growers():
            grower.observe(tree, logits_BNV)

    def took(self, nodes: int, seconds: float) -> None:
        """See Timed."""
        self._costs.took(nodes, seconds)

    def _growers(self) -> list[TrustedGrower]:
        return [grower for grower in (self._cheap, self._costly) if grower is not None]

    def _cheap_trees(self, state: DecodingState, memory: _Memory) -> list[PrefixTree]:
        if self._cheap is not None:
            trees = self._cheap.grow(state, self._costs.usual)
        else:
            trees = [PrefixTree(root) for root in state.roots_B.tolist()]
        if memory.suffixes is not None:
            for tree, paths in zip(trees, memory.suffixes.continuations(state), strict=True):
                for path in paths:
                    tree.add_path(*path)
        return trees

    def _worth_asking(self, trees: list[PrefixTree]) -> tuple[bool, float]:
        if self._costly is None:
            return False, 0.0
        promised = self._costly.expected_by_depth()
        if not promised:
            return True, 0.0
        return self._costs.worth_asking(trees, promised, self._alone.factor, self._ahead.factor)


class Rest:
    """Steps for which drafting is not thought about: the longer, the longer it has not paid."""

    def __init__(self) -> None:
        self.now = False  # whether the step being taken is one
        self._left = self._length = 0

    def goes_on(self) -> bool:
        """Whether the next step is one."""
        self._left -= 1
        self.now = self._left >= 0
        return self.now

    def after(self, *, drafted: bool) -> None:
        """A step that was thought about: whether anything was drafted."""
        self._length = 0 if drafted else min(2 * self._length + 1, _LONGEST_REST)
        self._left = self._length


class _Memory:
    """Of the texts being decoded: their suffixes, and what was last promised for them."""

    def __init__(self, sources: SuffixSources | None, most: int) -> None:
        self.suffixes = SuffixMemory(sources, most) if sources is not None else None
        self._promises: list[tuple[Belief, float]] = []
        self._rows: list[Row] = []
        self._before = 0

    def promise(self, state: DecodingState, belief: Belief, tokens: float) -> None:
        """So many drafted tokens are expected to be accepted in this step."""
        self._promises.append((belief, tokens))
        self._rows = state.rows
        self._before = sum(row.length for row in state.rows)

    def keep_promises(self) -> None:
        """Compare what was promised for the last step with what was committed."""
        accepted = sum(row.length - 1 for row in self._rows) - self._before
        for belief, promised in self._promises:
            belief.learn(promised, accepted)
        self._promises.clear()
