"""The trees of all rows, grown as far as it may pay."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.situation import FURTHER, Draft, Pace
from medusa_heads.inference.drafters.growing import Growing
from medusa_heads.trees.prefix_tree import PrefixTree

_FEW = 3  # nodes that trees grow by at least, before it is asked whether more of them may pay


def grown(
    growing: Sequence[Growing],
    budget: Budget,
    pace: Pace,
    *,
    whole: bool = False,
    exactly: int | None = None,
) -> Draft:
    """The number of nodes that gains the most, and trees of at least as many.

    All rows' trees grow side by side. No node is likelier than the one before it, so that it is
    known early that no larger trees can pay, and what they would hold is never found out.

    Args:
        growing: the trees, without a node so far, whose `further` is FURTHER.
        budget: what decides how many nodes pay.
        whole: the trees grow to their ends.
        exactly: so many nodes are taken, whether they pay or not.
    """
    sizes, trees = budget.sizes, [each.tree for each in growing]
    if exactly is not None:
        for each in growing:
            each.to(exactly)
        size = min(exactly, max(map(len, trees)) - 1)
        return Draft(trees, _expected(trees, pace, size), size)
    expected: dict[int, float] = {}
    nodes, counted = sizes[0], 0
    while True:
        for each in growing:
            each.to(nodes)
        next_B = [each.next for each in growing]
        more, longest = any(next_B), max(map(len, trees)) - 1
        while counted < len(sizes) and sizes[counted] <= longest:
            expected[sizes[counted]] = _expected(trees, pace, sizes[counted])
            counted += 1
        if longest not in expected:
            expected[longest] = _expected(trees, pace, longest)
        best, value = budget.best(expected, longest)
        if not more:
            break
        if not (whole or budget.may_pay(longest, value, _bound(trees, pace, next_B))):
            break
        larger = bisect_left(sizes, max(2 * nodes + 1, nodes + _FEW))
        nodes = sizes[min(larger, len(sizes) - 1)]
    return Draft(trees, expected[min(best, longest)], best)


def _expected(trees: Sequence[PrefixTree], pace: Pace, nodes: int) -> float:
    """Tokens of a row, where so many nodes of each are verified."""
    if len(trees) == 1:
        return trees[0].expected[nodes]
    return pace.of(*_counted(trees, nodes))


def _bound(
    trees: Sequence[PrefixTree], pace: Pace, next_B: Sequence[float]
) -> Callable[[int], float]:
    """No more is expected of trees with so many more nodes."""
    if len(trees) == 1:
        known, (likely,) = trees[0].expected[-1], next_B
        return lambda nodes: known + nodes * likely
    return pace.bound(*_counted(trees, -1), next_B)


def _counted(trees: Sequence[PrefixTree], nodes: int) -> tuple[list[float], list[float]]:
    """By rows: the tokens that come of so many nodes, or all, and what is left by them."""
    more_B, left_B = [], []
    for tree in trees:
        last = nodes if nodes < len(tree) else -1
        more_B.append(tree.expected[last])
        left_B.append(1.0 - (1.0 - FURTHER) * tree.nearer[last])
    return more_B, left_B
