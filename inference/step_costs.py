"""How many drafted nodes pay in this very step, from what steps of each size cost.

A step that verifies the n likeliest nodes commits E tokens, 1 and for every depth the chance that
one of its nodes is accepted, and takes t(n) seconds: the n with the largest E / t(n) is taken. Of a
batch E is the rows' harmonic mean: it is done when its slowest row is, and gains little from rows
that run ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest

import torch

from medusa_heads.prefix_tree import PrefixTree, to_token_tree
from medusa_heads.tree import TokenTree


class StepCosts:
    """Seconds of a step by drafted nodes.

    Args:
        seconds: by number of nodes, the root not counted: of a step without its drafting. Of 0
            nodes, a step of plain decoding.
        draft_seconds: of drafting, until `learn_drafting` is told better.
        fixed: every tree has as many nodes, spare ones included (one graph where the target is
            compiled).
        usual: how many nodes are taken on the whole, one of the sizes; by default the most.

    Attributes:
        most: the largest number of drafted nodes.
        usual: how many were taken when a drafter was last asked.

    Raises:
        ValueError: no size, or a time that is not above 0.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        *,
        draft_seconds: float = 0.0,
        fixed: bool = False,
        usual: int | None = None,
    ) -> None:
        if not seconds or min(seconds) < 0 or min(seconds.values()) <= 0:
            raise ValueError(f"step costs need sizes of at least 0 and times above 0: {seconds}")
        self._sizes = sorted(seconds)
        # More nodes never cost less: what a measurement says otherwise is its noise.
        self._seconds = list(accumulate((seconds[size] for size in self._sizes), max))
        self._drafting = draft_seconds
        self._fixed = fixed
        self.most = self._sizes[-1]
        self.usual = self.most if usual is None else usual
        assert self.usual in self._sizes

    @classmethod
    def of_size(cls, size: int, *, fixed: bool = False) -> StepCosts:
        """As if all sizes up to this one cost the same: as many nodes as there are."""
        return cls(dict.fromkeys(range(size + 1), 1.0), fixed=fixed)

    def worth_asking(
        self,
        chains: Sequence[Sequence[float]],
        by_depth: Sequence[float],
        belief: float = 1.0,
    ) -> bool:
        """Whether drafting pays where chains are known already.

        Args:
            chains: of every row, the chance that the first 1, 2, .. tokens of its chain are right.
            by_depth: the chance that the `usual` likeliest nodes of what would be drafted hold the
                first 1, 2, .. tokens; empty where nothing is known of them.
            belief: by which the chances of both together are multiplied.
        """
        if not by_depth:
            return True
        alone = max(
            _harmonic_mean([1.0 + sum(chain[:size]) for chain in chains]) / self._seconds[place]
            for place, size in enumerate(self._sizes)
        )
        together = []
        for chain in chains:
            both = zip_longest(chain, by_depth, fillvalue=0.0)
            either = sum(1 - (1 - known) * (1 - drafted) for known, drafted in both)
            together.append(1.0 + belief * either)
        drafted = self._seconds[self._sizes.index(self.usual)] + self._drafting
        return _harmonic_mean(together) / drafted > alone

    def cut(
        self,
        trees: Sequence[PrefixTree],
        device: torch.device,
        *,
        asked: bool = True,
        belief: float = 1.0,
    ) -> tuple[TokenTree, float]:
        """Of every row's tree the likeliest nodes, as many in all rows as pay for all together.

        Args:
            trees: one a row.
            device: where the tensors go.
            asked: whether a step so costs what drafting costs, too.
            belief: by which the trees' chances are multiplied.

        Returns:
            The nodes, and how many of them are expected to be accepted, before `belief`.
        """
        orders = [tree.best_first() for tree in trees]
        drafting = self._drafting if asked else 0.0
        size, promised = self._best_size(trees, orders, drafting, belief)
        if asked and size:
            self.usual = size
        kept = [tree.only(order[:size]) for tree, order in zip(trees, orders, strict=True)]
        return to_token_tree(kept, device, self.most + 1 if self._fixed else 1), promised

    def learn_drafting(self, seconds: float) -> None:
        """What drafting has just taken; by and by that is what it is taken to cost."""
        # Now and then something else takes the processor for a while.
        believable = min(seconds, 3 * self._drafting or seconds)
        self._drafting += 0.05 * (believable - self._drafting)

    def _best_size(
        self,
        trees: Sequence[PrefixTree],
        orders: Sequence[list[int]],
        drafting: float,
        belief: float,
    ) -> tuple[int, float]:
        longest = max(map(len, orders))
        by_depth = [[0.0] * (max(tree.depth) + 1) for tree in trees]
        best, best_speed, best_promised, counted = 0, 0.0, 0.0, 0
        # Beyond the first size that holds all there is, nothing is gained.
        for place in range(min(bisect_left(self._sizes, longest) + 1, len(self._sizes))):
            size = self._sizes[place]
            promised = []
            for tree, order, chances in zip(trees, orders, by_depth, strict=True):
                for node in order[counted:size]:
                    chances[tree.depth[node]] += tree.chances[node]
                # Two drafters that disagree may promise more than a certainty.
                promised.append(sum(min(chance, 1.0) for chance in chances))
            counted = size
            speed = _harmonic_mean([1.0 + belief * each for each in promised])
            speed /= self._seconds[place] + drafting
            if speed > best_speed:
                best, best_speed, best_promised = size, speed, sum(promised)
        return best, best_promised


def _harmonic_mean(values: Sequence[float]) -> float:
    return len(values) / sum(1 / value for value in values)
