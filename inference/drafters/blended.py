"""Drafts of heads and of the text itself in one tree, of the size that pays at this very step.

Shapes: B active rows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from medusa_heads.inference.drafters.base import Observer
from medusa_heads.inference.drafters.suffix_memory import SuffixMemory
from medusa_heads.inference.drafters.trust import Belief, SuffixTrust, TreeTrust
from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from torch import Tensor

    from medusa_heads.inference.drafters.growing import Grower
    from medusa_heads.inference.row import Row
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree


class BlendedDrafter:
    """Another drafter's trees with the continuation of each row's longest suffix merged in.

    Of both drafters' nodes those are verified that are likeliest to be accepted, and as many as
    pay: a long chain where the text repeats itself, the other drafter's tree where it does not,
    little where neither has been right of late. Where the text promises more by itself than what
    the other drafter could add is worth, that one is not asked.

    Args:
        base: grows the other trees.
        costs: what steps of each size cost here.
        suffix: whether the text's own drafts are merged in at all.
    """

    def __init__(self, base: Grower, costs: StepCosts, *, suffix: bool = True) -> None:
        self.grower = base
        self._costs = costs
        self._longest = costs.most if suffix else 0
        self._suffix_trust = SuffixTrust()
        self._tree_trust = TreeTrust()
        self._belief = Belief()  # the two may contradict each other, and promise too much together
        # What the base's trees promise by depth, before they are drafted: a running mean.
        self._promise: list[float] = []
        self.reads_prompt = base.reads_prompt

    @property
    def num_nodes(self) -> int:
        """The most nodes that a proposed tree has, the root included."""
        return self._costs.most + 1

    def propose(self, state: DecodingState) -> TokenTree:
        """The likeliest nodes of both, for every active row."""
        started = time.perf_counter()
        memory = state.memories.get(self)
        if memory is None:
            memory = state.memories[self] = _Memory(self._suffix_trust, self._longest)
        memory.learn(state, self._tree_trust, self._belief)
        found = memory.suffixes.continuations(state)
        asked = self._costs.worth_asking(
            [chances for _, chances in found], self._expected_by_depth(), self._belief.factor
        )
        if asked:
            drafted = self.grower.grow(state)
            for tree in drafted:
                self._remember_promise(tree)
            memory.drafted = {
                row.index: (row.length, tree) for row, tree in zip(state.rows, drafted, strict=True)
            }
            trees = [self._believed(tree) for tree in drafted]
        else:
            self._tree_trust.forgive()
            self._belief.forgive()
            trees = [PrefixTree(root) for root in state.roots_B.tolist()]
        for tree, (tokens, chances) in zip(trees, found, strict=True):
            tree.add_path(tokens, chances)
        drafts, promised = self._costs.cut(
            trees,
            state.roots_B.device,
            asked=asked,
            belief=self._belief.factor if asked else 1.0,
        )
        if asked:
            self._costs.learn_drafting(time.perf_counter() - started)
        if asked and promised:
            memory.promised = (promised, sum(row.length for row in state.rows), state.rows)
        return drafts

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """See Observer."""
        if isinstance(self.grower, Observer):
            self.grower.observe(tree, logits_BNV)

    def _expected_by_depth(self) -> list[float]:
        """The chance that a base tree holds the first 1, 2, .. tokens; empty before the first."""
        factors = self._tree_trust.factors(len(self._promise))
        pairs = zip(self._promise, factors[1:], strict=True)
        return [min(promise * factor, 1.0) for promise, factor in pairs]

    def _remember_promise(self, tree: PrefixTree) -> None:
        by_depth = [0.0] * max(tree.depth)
        for node in tree.best_first()[: self._costs.usual]:
            by_depth[tree.depth[node] - 1] += tree.chances[node]
        self._promise += by_depth[len(self._promise) :]
        for level, chance in enumerate(by_depth):
            self._promise[level] += 0.1 * (chance - self._promise[level])

    def _believed(self, drafted: PrefixTree) -> PrefixTree:
        """A copy whose chances are what they have turned out to be."""
        factors = self._tree_trust.factors(max(drafted.depth))
        tree = PrefixTree(drafted.tokens[0])
        for node in range(1, len(drafted)):
            chance = drafted.chances[node] * factors[drafted.depth[node]]
            tree.add(drafted.parents[node], drafted.tokens[node], chance)
        return tree


class _Memory:
    """Of the texts being decoded: their suffixes, and the trees last drafted for them."""

    def __init__(self, trust: SuffixTrust, most: int) -> None:
        self.suffixes = SuffixMemory(trust, most)
        self.drafted: dict[int, tuple[int, PrefixTree]] = {}
        self.promised: tuple[float, int, list[Row]] | None = None

    def learn(self, state: DecodingState, trust: TreeTrust, belief: Belief) -> None:
        """Compare the trees drafted last with what was committed since."""
        if self.promised is not None:
            promised, before, rows = self.promised
            belief.learn(promised, sum(row.length - 1 for row in rows) - before)
            self.promised = None
        for row in state.rows:
            length, tree = self.drafted.pop(row.index, (row.length, None))
            if tree is not None:
                trust.learn(tree, row.behind(length))
