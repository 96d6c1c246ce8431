"""How large a tree pays on this machine: expected tokens a step over the measured time of a step.

A tree of n nodes commits E(n) tokens a step, known from the heads' statistics, and a step takes
t(n) seconds, measured here on the very target, dtype and device, once, and kept on disk. The tree
that maximises E(n) / t(n) decodes fastest; on a GPU that may be 64 nodes, on two CPU cores eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from medusa_heads.compiled import CompiledTarget
from medusa_heads.heads import DraftHeads
from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.inference.step_seconds import DEFAULT_CONTEXT, SIZES, last_row, room, step_seconds
from medusa_heads.inference.tree_plan import make_drafter
from medusa_heads.statistics import HeadStatistics
from medusa_heads.target import TargetModel

_MOST_NODES = 1024
_AS_FAST = 0.98  # closer than this, measured times do not tell two trees apart


@dataclass(frozen=True)
class TreeSize:
    """One size of tree on this machine.

    Attributes:
        tree: in the words of tree_plan.py.
        step_seconds: measured time of a step.
        tokens_per_step: expected at a random position.
        drafting_seconds: of the step's, those of the draft.
    """

    tree: str
    step_seconds: float
    tokens_per_step: float
    drafting_seconds: float = 0.0

    @property
    def nodes(self) -> int:
        """Drafted nodes."""
        return int(self.tree.partition(":")[2] or 0)

    @property
    def tokens_per_second(self) -> float:
        """What the size is chosen by."""
        return self.tokens_per_step / self.step_seconds


def best_tree(
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics,
    *,
    context: int = DEFAULT_CONTEXT,
    batch_size: int = 1,
) -> str:
    """The tree that this machine decodes fastest with, in the words of tree_plan.py."""
    sizes = tune(target, heads, statistics, context=context, batch_size=batch_size)
    return fastest(sizes, batch_size).tree


def fastest(sizes: Sequence[TreeSize], batch_size: int = 1) -> TreeSize:
    """Of measured trees the one to draft: the smallest among the fastest.

    Rows without drafts keep step. With drafts a batch waits for its last row: a tree must gain more
    than that.
    """

    def speed(size: TreeSize) -> float:
        return size.tokens_per_second / (last_row(batch_size) if size.nodes else 1.0)

    best = max(map(speed, sizes))
    return min((s for s in sizes if speed(s) >= _AS_FAST * best), key=lambda s: s.nodes)


def tune(
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics,
    *,
    context: int = DEFAULT_CONTEXT,
    batch_size: int = 1,
    refresh: bool = False,
) -> list[TreeSize]:
    """Every tree worth considering, with its measured step time.

    Args:
        target: the target.
        heads: attached to it.
        statistics: measured ranks of the heads.
        context: tokens in the cache while measuring.
        batch_size: sequences decoded together.
        refresh: measure even if an earlier measurement is on disk.

    Raises:
        ValueError: the context does not fit the target.
    """
    expected = expected_tokens(statistics)
    # More nodes than this in all rows together pay on no machine, and take long to measure.
    most = min(max(_MOST_NODES // batch_size, 1), room(target))
    expected = {
        tree: tokens for tree, tokens in expected.items() if int(tree.partition(":")[2] or 0) < most
    }
    drafters = {tree: make_drafter(tree, heads, statistics) for tree in expected}
    kind = heads.config.to_dict() | {"preview": heads.previews is not None}
    seconds = step_seconds(target, drafters, kind, context, batch_size, refresh=refresh)
    return [
        TreeSize(tree, seconds[tree].step, tokens, seconds[tree].drafting)
        for tree, tokens in expected.items()
    ]


def expected_tokens(statistics: HeadStatistics) -> dict[str, float]:
    """Expected tokens a step of each tree considered."""
    largest = len(statistics.paths)
    static = {f"static:{n}": statistics.expected_tokens_per_step(n) for n in SIZES if n <= largest}
    dynamic = {f"dynamic:{n}": e for n, e in statistics.dynamic_tokens_per_step.items()}
    # Drafting nothing is a choice too: on some machines every tree costs more than it brings.
    return {"none": 1.0} | static | dynamic


def step_costs(
    target: TargetModel, heads: DraftHeads, statistics: HeadStatistics, *, batch_size: int = 1
) -> StepCosts:
    """What steps cost here by their number of nodes, for drafters that choose it at every step.

    Of a target that is compiled, for which every number is another graph, the fastest one.
    """
    sizes = tune(target, heads, statistics, batch_size=batch_size)
    static = [size for size in sizes if not size.tree.startswith("dynamic")]
    best = fastest(static, batch_size)
    if isinstance(target, CompiledTarget):
        return StepCosts({best.nodes: best.step_seconds}, fixed=True)
    drafting = [size for size in static if size.nodes]
    waits = last_row(batch_size)
    return StepCosts(
        {size.nodes: size.step_seconds - size.drafting_seconds for size in static},
        draft_seconds=median(size.drafting_seconds for size in drafting) * waits,
        usual=best.nodes,
        waits=waits,
        learns=batch_size == 1,  # the rows of a batch end, and its steps get faster
    )
