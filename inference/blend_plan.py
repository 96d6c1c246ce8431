"""Trees in which the heads' drafts and the text's own stand together.

auto            as many nodes as pay at each step on this machine: the default
16+suffix       a tree's likeliest nodes, some of them given to what the text itself suggests
"""

from __future__ import annotations

from medusa_heads.compiled import CompiledTarget
from medusa_heads.heads import DraftHeads
from medusa_heads.inference.corpus_index import CorpusIndex
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.growing import TensorTrees
from medusa_heads.inference.drafters.recycling import RecyclingDrafter
from medusa_heads.inference.drafters.suffix import SuffixDrafter
from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.inference.tree_plan import TreeSpec, make_drafter
from medusa_heads.inference.tree_size import step_costs
from medusa_heads.statistics import HeadStatistics
from medusa_heads.target import TargetModel

SUFFIX = "+suffix"
_WIDEST = 31  # nodes of the heads' tree that a step's own tree is picked from
_FEWEST = 3


def blends(tree: str) -> bool:
    """Whether a tree's words ask for the text's own drafts beside the heads'."""
    return tree == "auto" or tree.endswith(SUFFIX)


def continues_text(tree: TreeSpec) -> bool:
    """Whether a tree, or a drafter without heads, drafts what followed where the text ended as it
    does now."""
    return isinstance(tree, str) and (blends(tree) or tree.partition(":")[0] == "suffix")


def blended(
    tree: str,
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics,
    *,
    batch_size: int = 1,
    corpus: CorpusIndex | None = None,
) -> Drafter:
    """The drafter of such a tree.

    Args:
        tree: the words.
        target, heads, statistics: that belong together.
        batch_size: rows decoded together.
        corpus: continued as well as the text itself; None for none.

    Raises:
        ValueError: an unknown form, or a tree that does not fit the heads.
    """
    if tree == "auto":
        costs = step_costs(target, heads, statistics, batch_size=batch_size)
        # Heads that see each other are asked for every level and path: no more than is worth it.
        nodes = min(costs.most, max(costs.usual, _FEWEST) if heads.sequential else _WIDEST)
        drafter = make_drafter(f"static:{nodes}" if nodes else "none", heads, statistics)
    else:
        drafter = make_drafter(tree.removesuffix(SUFFIX), heads, statistics)
        if drafter.num_nodes == 1 or isinstance(drafter, SuffixDrafter):
            raise ValueError(f"{tree!r} leaves the heads nothing to draft: use 'suffix'")
        fixed = isinstance(target, CompiledTarget)
        costs = StepCosts.of_size(drafter.num_nodes - 1, fixed=fixed)
    grower = TensorTrees(drafter, _chances(drafter, statistics))
    if tree != "auto":
        return BlendedDrafter(grower, costs, corpus=corpus)
    recycling = RecyclingDrafter(target.vocab_size, min(costs.most, _WIDEST))
    return BlendedDrafter(grower, costs, cheap=recycling, corpus=corpus)


def _chances(drafter: Drafter, statistics: HeadStatistics) -> list[float] | None:
    """Of a tree that always looks alike, how likely its nodes are accepted."""
    shape = getattr(drafter, "shape", None)
    if shape is None:
        return None
    counts = dict(statistics.paths)
    return [counts.get(path, 0) / statistics.positions for path in shape.choices]
