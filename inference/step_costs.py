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
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_heads.prefix_tree import PrefixTree, to_token_tree
from medusa_heads.tree import TokenTree


class _Size(NamedTuple):
    size: int
    speed: float  # tokens of a row a second
    promised: float  # drafted tokens of all rows that are expected to be accepted


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
        usual: how many were taken when last any were.

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
        # Fewer nodes never cost more: where a measurement says otherwise, something else had the
        # processor. That only ever adds to a time, so the lower one is believed.
        falling = accumulate((seconds[size] for size in reversed(self._sizes)), min)
        self._seconds = list(falling)[::-1]
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
        trees: Sequence[PrefixTree],
        by_depth: Sequence[float],
        alone_belief: float = 1.0,
        belief: float = 1.0,
    ) -> tuple[bool, float]:
        """Whether drafting pays where some drafts are known already.

        Args:
            trees: of every row, what is known.
            by_depth: the chance that the `usual` likeliest nodes of what would be drafted hold the
                first 1, 2, .. tokens.
            alone_belief: by which the chances of what is known are multiplied.
            belief: by which those of both together are.

        Returns:
            Whether, and how many tokens would then be expected to be accepted, before `belief`.
        """
        orders = [tree.best_first() for tree in trees]
        alone = self._best_size(trees, orders, 0.0, alone_belief)
        usual = self._sizes.index(self.usual)
        together = []
        for tree, order in zip(trees, orders, strict=True):
            known_by_depth = tree.by_depth(order[: self.usual])
            both = zip_longest(known_by_depth, by_depth, fillvalue=0.0)
            together.append(sum(1 - (1 - known) * (1 - drafted) for known, drafted in both))
        speed = _harmonic_mean([1.0 + belief * each for each in together])
        speed /= self._seconds[usual] + self._drafting
        return speed > alone.speed, sum(together)

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
        best = self._best_size(trees, orders, drafting, belief)
        if best.size:
            self.usual = best.size
        kept = [tree.only(order[: best.size]) for tree, order in zip(trees, orders, strict=True)]
        return to_token_tree(kept, device, self.most + 1 if self._fixed else 1), best.promised

    def nothing(self, roots_B: Tensor) -> TokenTree:
        """Trees without drafts."""
        return self.cut([PrefixTree(root) for root in roots_B.tolist()], roots_B.device)[0]

    def seconds(self, nodes: int) -> float:
        """Of a step with so many drafted nodes, its drafting left out."""
        return self._seconds[min(bisect_left(self._sizes, nodes), len(self._sizes) - 1)]

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
    ) -> _Size:
        longest = max(map(len, orders))
        by_depth = [[0.0] * (max(tree.depth) + 1) for tree in trees]
        best, counted = _Size(0, 0.0, 0.0), 0
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
            if speed > best.speed:
                best = _Size(size, speed, sum(promised))
        return best


def _harmonic_mean(values: Sequence[float]) -> float:
    return len(values) / sum(1 / value for value in values)
