"""How large a fixed tree pays on this machine: expected tokens a step over a step's measured time.

A tree of n nodes commits E(n) tokens a step, known from the heads' statistics, and a step takes
t(n) seconds, measured here on the very target, dtype and device, once, and kept on disk. The tree
that maximises E(n) / t(n) decodes fastest; on a GPU that may be 64 nodes, on two CPU cores eight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_heads.heads import DraftHeads
from medusa_heads.heads.drafting import near_layers
from medusa_heads.inference.adapt.measure import DEFAULT_CONTEXT, room, step_seconds
from medusa_heads.inference.adapt.step_bench import SIZES
from medusa_heads.inference.engine.capability import capability
from medusa_heads.inference.plan.trees import make_drafter
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics

BESIDE_OTHERS = (
    "Steps waited for processors while they were measured, as beside other programs, and such "
    "times are not kept: measure again with --refresh when nothing else runs."
)
"""What is said of measured trees where that is so of any."""

MOST_NODES = 1024
"""Of all rows together: more pay on no machine, and take long to measure."""
_AS_FAST = 0.98  # closer than this, measured times do not tell two trees apart


@dataclass(frozen=True)
class TreeSize:
    """One size of tree on this machine, in the words of trees.py: the measured time of a step, that
    of its draft among it, and the tokens expected of it at a random position; and whether other
    programs had the processors while it was measured."""

    tree: str
    step_seconds: float
    tokens_per_step: float
    drafting_seconds: float = 0.0
    beside_others: bool = False

    @property
    def nodes(self) -> int:
        return _nodes(self.tree)

    @property
    def tokens_per_second(self) -> float:
        """What the size is chosen by."""
        return self.tokens_per_step / self.step_seconds


def _nodes(tree: str) -> int:
    return int(tree.partition(":")[2] or 0)


def best_tree(target: TargetModel, heads: DraftHeads, statistics: HeadStatistics) -> str:
    """The tree that this machine decodes fastest with, in the words of trees.py."""
    return fastest(tune(target, heads, statistics)).tree


def fastest(sizes: Sequence[TreeSize]) -> TreeSize:
    """Of measured trees the one to draft: the smallest among the fastest."""
    best = max(size.tokens_per_second for size in sizes)
    as_fast = (size for size in sizes if size.tokens_per_second >= _AS_FAST * best)
    return min(as_fast, key=lambda size: size.nodes)


def tune(
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics,
    *,
    context: int = DEFAULT_CONTEXT,
    batch_size: int = 1,
    refresh: bool = False,
) -> list[TreeSize]:
    """Every tree worth considering, with its measured step time, for so many tokens in the cache
    and sequences decoded together; `refresh` measures anew. Raises ValueError: the context does not
    fit the target."""
    expected = expected_tokens(statistics, chain_only=capability(target) != "tree")
    most = min(max(MOST_NODES // batch_size, 1), room(target))
    expected = {tree: tokens for tree, tokens in expected.items() if _nodes(tree) < most}
    kind = read_as(heads)
    where = {"context": context, "batch_size": batch_size, "refresh": refresh}
    return measured_sizes(target, heads, statistics, expected, kind, **where)


def read_as(heads: DraftHeads) -> dict[str, Any]:
    """What drafting takes depends on, besides the heads' configuration."""
    near = sorted({type(layer).__name__ for layer in near_layers(heads)})
    return {"preview": heads.previews is not None, "layers": near}


def measured_sizes(
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics,
    expected: Mapping[str, float],
    kind: dict[str, Any],
    **where: Any,
) -> list[TreeSize]:
    """Trees by the tokens expected of a step, with its measured time; `kind` and `where` are those
    of `step_seconds`."""
    drafters = {tree: make_drafter(tree, heads, statistics) for tree in expected}
    of = heads.config.to_dict() | kind
    seconds, beside_others = step_seconds(target, drafters, of, **where)
    return [
        TreeSize(tree, seconds[tree].step, tokens, seconds[tree].drafting, beside_others)
        for tree, tokens in expected.items()
    ]


def chain_chances(statistics: HeadStatistics) -> list[float]:
    """The chance that the first 1, 2, .. best guesses of the heads are all right."""
    counts = dict(statistics.paths)
    # What is so rare that no path was kept for it counts as never.
    return [
        counts.get((0,) * depth, 0) / statistics.positions
        for depth in range(1, statistics.num_heads + 1)
    ]


def expected_tokens(statistics: HeadStatistics, *, chain_only: bool = False) -> dict[str, float]:
    """Expected tokens a step of each tree considered, or of each chain."""
    # Drafting nothing is a choice too: on some machines every tree costs more than it brings.
    none = {"none": 1.0}
    if chain_only:
        chances = chain_chances(statistics)
        lengths = range(1, len(chances) + 1)
        return none | {f"chain:{length}": 1 + math.fsum(chances[:length]) for length in lengths}
    largest = len(statistics.paths)
    static = {f"static:{n}": statistics.expected_tokens_per_step(n) for n in SIZES if n <= largest}
    dynamic = {f"dynamic:{n}": e for n, e in statistics.dynamic_tokens_per_step.items()}
    return none | static | dynamic
