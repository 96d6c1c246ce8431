"""How many drafted nodes pay in this very step, from what steps of each size cost.

A step that verifies the n likeliest nodes commits E tokens, 1 and for every depth the chance that
one of its nodes is accepted, and takes t(n) seconds: the n with the largest E / t(n) is taken.
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
        seconds: by number of nodes, the root not counted: a step with drafting. Of 0 nodes, a step
            of plain decoding.
        draft_seconds: how much of a step is drafting, where a drafter need not be asked.
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
        self._asked = list(
            accumulate(
                (seconds[size] + (0 if size else draft_seconds) for size in self._sizes), max
            )
        )
        self._unasked = list(
            accumulate(
                (seconds[size] - (draft_seconds if size else 0) for size in self._sizes), max
            )
        )
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
            sum(1.0 + sum(chain[:size]) for chain in chains) / self._unasked[place]
            for place, size in enumerate(self._sizes)
        )
        together = 0.0
        for chain in chains:
            both = zip_longest(chain, by_depth, fillvalue=0.0)
            either = sum(1 - (1 - known) * (1 - drafted) for known, drafted in both)
            together += 1.0 + belief * either
        return together / self._asked[self._sizes.index(self.usual)] > alone

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
        seconds = self._asked if asked else self._unasked
        size, promised = self._best_size(trees, orders, seconds, belief)
        if asked and size:
            self.usual = size
        kept = [tree.only(order[:size]) for tree, order in zip(trees, orders, strict=True)]
        return to_token_tree(kept, device, self.most + 1 if self._fixed else 1), promised

    def _best_size(
        self,
        trees: Sequence[PrefixTree],
        orders: Sequence[list[int]],
        seconds: Sequence[float],
        belief: float,
    ) -> tuple[int, float]:
        longest = max(map(len, orders))
        by_depth = [[0.0] * (max(tree.depth) + 1) for tree in trees]
        best, best_speed, best_promised, counted = 0, 0.0, 0.0, 0
        # Beyond the first size that holds all there is, nothing is gained.
        for place in range(min(bisect_left(self._sizes, longest) + 1, len(self._sizes))):
            size = self._sizes[place]
            promised = 0.0
            for tree, order, chances in zip(trees, orders, by_depth, strict=True):
                for node in order[counted:size]:
                    chances[tree.depth[node]] += tree.chances[node]
                # Two drafters that disagree may promise more than a certainty.
                promised += sum(min(chance, 1.0) for chance in chances)
            counted = size
            speed = (len(trees) + belief * promised) / seconds[place]
            if speed > best_speed:
                best, best_speed, best_promised = size, speed, promised
        return best, best_promised
