"""A grower together with how far its trees have turned out to be right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from medusa_heads.inference.drafters.base import Observer
from medusa_heads.inference.drafters.trust import TreeTrust
from medusa_heads.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from medusa_heads.inference.drafters.growing import Grower
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree


class TrustedGrower:
    """Grows trees whose chances are what they have turned out to be.

    Args:
        grower: grows trees with its own chances.
    """

    def __init__(self, grower: Grower) -> None:
        self.grower = grower
        self.reads_prompt = grower.reads_prompt
        self._trust = TreeTrust()
        # What the trees' likeliest nodes promise by depth, before they are grown: a running mean.
        self._promise: list[float] = []

    def grow(self, state: DecodingState, count: int) -> list[PrefixTree]:
        """See Grower. `count` nodes of a tree are usually taken."""
        grown = self.grower.grow(state)
        drafted = state.memories.setdefault(self, {})
        for row, tree in zip(state.rows, grown, strict=True):
            drafted[row.index] = (row.length, tree)
            self._remember_promise(tree, count)
        return [self._believed(tree) for tree in grown]

    def learn(self, state: DecodingState) -> None:
        """Compare the trees grown last with what was committed since."""
        drafted = state.memories.get(self, {})
        for row in state.rows:
            length, tree = drafted.pop(row.index, (row.length, None))
            if tree is not None:
                self._trust.learn(tree, row.behind(length))

    def forgive(self) -> None:
        """A step for which no tree was grown."""
        self._trust.forgive()

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """See Observer."""
        if isinstance(self.grower, Observer):
            self.grower.observe(tree, logits_BNV)

    def expected_by_depth(self) -> list[float]:
        """The chance that a tree will hold the first 1, 2, .. tokens; empty before the first."""
        factors = self._trust.factors(len(self._promise))
        pairs = zip(self._promise, factors[1:], strict=True)
        return [min(promise * factor, 1.0) for promise, factor in pairs]

    def _remember_promise(self, tree: PrefixTree, count: int) -> None:
        by_depth = tree.by_depth(tree.best_first()[:count])
        self._promise += by_depth[len(self._promise) :]
        for level, chance in enumerate(by_depth):
            self._promise[level] += 0.1 * (chance - self._promise[level])

    def _believed(self, grown: PrefixTree) -> PrefixTree:
        """A copy with other chances; the tree itself is still to be learnt from."""
        factors = self._trust.factors(max(grown.depth))
        tree = PrefixTree(grown.tokens[0])
        for node in range(1, len(grown)):
            chance = grown.chances[node] * factors[grown.depth[node]]
            tree.add(grown.parents[node], grown.tokens[node], chance)
        return tree
