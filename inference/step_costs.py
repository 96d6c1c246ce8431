"""How many drafted nodes pay in this very step, from what steps of each size cost.

A step that verifies the n likeliest nodes commits E tokens, 1 and for every depth the chance that
one of its nodes is accepted, and takes t(n) seconds: the n with the largest E / t(n) is taken. Of a
batch E is the rows' harmonic mean: it is done when its slowest row is, and gains little from rows
that run ahead.

What was measured is where t(n) begins; the steps that are taken correct it. A size that is wrongly
thought slow would never be taken, so that now and then one that little is known of is tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_heads.inference.step_drift import StepDrift
from medusa_heads.prefix_tree import PrefixTree, to_token_tree
from medusa_heads.tree import TokenTree

_BETWEEN_TRIALS = 48  # trees
_DOUBTED = 0.1
_ALL_OF, _ONE_IN = 32, 4  # steps that are learnt from: all of the first ones, then one in so many
_DRAFTS_COUNTED = 20  # what drafting took longer ago counts little
_MEASURED_COUNTS = 3  # drafts


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
        waits: how many steps the last row of a batch takes with drafts, over the mean row's.
            Without drafts all rows keep step.
        learns: whether the steps that are taken correct the seconds.

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
        waits: float = 1.0,
        learns: bool = False,
    ) -> None:
        if not seconds or min(seconds) < 0 or min(seconds.values()) <= 0:
            raise ValueError(f"step costs need sizes of at least 0 and times above 0: {seconds}")
        self._sizes = sorted(seconds)
        # Fewer nodes never cost more: where a measurement says otherwise, something else had the
        # processor. That only ever adds to a time, so the lower one is believed.
        falling = accumulate((seconds[size] for size in reversed(self._sizes)), min)
        measured = list(falling)[::-1]
        self._drift = StepDrift(self._sizes, measured) if learns else None
        self._waits = [waits if size else 1.0 for size in self._sizes]
        self._take(measured)
        self._drafting = draft_seconds
        self._drafts_counted = _MEASURED_COUNTS
        self._until_trial = _BETWEEN_TRIALS
        self._lessons = self._until_lesson = 0
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
        best = self._on_trial(best, trees, orders)
        kept = [tree.only(order[: best.size]) for tree, order in zip(trees, orders, strict=True)]
        return to_token_tree(kept, device, self.most + 1 if self._fixed else 1), best.promised

    def nothing(self, roots_B: Tensor) -> TokenTree:
        """Trees without drafts."""
        return self.cut([PrefixTree(root) for root in roots_B.tolist()], roots_B.device)[0]

    def seconds(self, nodes: int) -> float:
        """Of a step with so many drafted nodes, its drafting left out."""
        return self._seconds[min(bisect_left(self._sizes, nodes), len(self._sizes) - 1)]

    def took(self, nodes: int, seconds: float) -> None:
        """A step that verified so many drafted nodes has taken so long, its drafting left out."""
        self._until_lesson -= 1
        if self._drift is None or self._until_lesson > 0:
            return
        # A lesson takes 50 microseconds and more: soon a sample of the steps says enough.
        self._lessons += 1
        self._until_lesson = 1 if self._lessons < _ALL_OF else _ONE_IN
        self._drift.learn(nodes, seconds)
        self._take(self._drift.seconds().tolist())

    def learn_drafting(self, seconds: float) -> None:
        """What drafting has just taken; by and by that is what it is taken to cost."""
        # Now and then something else takes the processor for a while.
        believable = min(seconds, 3 * self._drafting or seconds)
        self._drafts_counted = min(self._drafts_counted + 1, _DRAFTS_COUNTED)
        self._drafting += (believable - self._drafting) / self._drafts_counted

    def _take(self, seconds: Sequence[float]) -> None:
        """Go by these seconds of the sizes from now on."""
        self._seconds = [each * wait for each, wait in zip(seconds, self._waits, strict=True)]

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

    def _on_trial(
        self, best: _Size, trees: Sequence[PrefixTree], orders: Sequence[list[int]]
    ) -> _Size:
        """Now and then the size behind the best one, if little is known of it."""
        larger = self._sizes.index(best.size) + 1
        if self._drift is None or max(map(len, orders)) <= best.size or larger == len(self._sizes):
            return best
        self._until_trial -= 1
        if self._until_trial > 0:
            return best
        self._until_trial, self._until_lesson = _BETWEEN_TRIALS, 0
        if self._drift.doubt(larger - 1, larger) < _DOUBTED:
            return best
        size = self._sizes[larger]
        pairs = zip(trees, orders, strict=True)
        return _Size(size, best.speed, sum(sum(tree.by_depth(o[:size])) for tree, o in pairs))


def _harmonic_mean(values: Sequence[float]) -> float:
    return len(values) / sum(1 / value for value in values)
