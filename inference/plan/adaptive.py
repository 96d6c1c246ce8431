"""Drafters that choose at every step how much to draft, and from what.

auto            as many nodes as pay at each step on this machine, of the heads and of the text
16+suffix       a tree's likeliest nodes, some of them given to what the text itself suggests
suffix, recycling, auto without heads, and so on: see models/training_free.py
"""

from __future__ import annotations

from collections.abc import Sequence

from medusa_heads.heads import DraftHeads
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.measure import SIZES, room, target_clock
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.growing import Source
from medusa_heads.inference.drafters.heads import HeadsSource, TreeSource
from medusa_heads.inference.drafters.recycling import RecyclingSource
from medusa_heads.inference.drafters.text import TextSource
from medusa_heads.inference.lookup.corpus_index import CorpusIndex
from medusa_heads.inference.plan.trees import TreeSpec, make_drafter
from medusa_heads.target.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics

SUFFIX = "+suffix"
_UNVARYING = 15  # nodes; with the root a multiple of what matrix units take at a time
_SEQUENTIAL = (3, 7, 15, 23, 31)  # nodes of the trees that heads which see each other may draft


def blends(tree: TreeSpec) -> bool:
    """Whether a tree's words ask for the text's own drafts beside the heads'."""
    return isinstance(tree, str) and (tree == "auto" or tree.endswith(SUFFIX))


def continues_text(tree: TreeSpec) -> bool:
    """Whether a tree, or a drafter without heads, drafts what followed where the text ended as it
    does now."""
    return blends(tree) or (isinstance(tree, str) and tree.partition(":")[0] == "suffix")


def sizes_for(target: TargetModel) -> list[int]:
    """Numbers of drafted nodes that this target can verify; 0 is plain decoding."""
    return [size for size in (0, *SIZES) if size < room(target)]


def automatic(
    target: TargetModel,
    sources: Sequence[Source] = (),
    *,
    text: bool = True,
    corpus: CorpusIndex | None = None,
    chain_only: bool = False,
    clock: Clock | None = None,
) -> BlendedDrafter:
    """A drafter that verifies at every step as many nodes as pay on this machine.

    Args:
        target: whose steps are measured.
        sources: what may be asked besides the text.
        text: whether the text itself is drafted from.
        corpus: continued as well; None for none.
        chain_only: the target verifies chains alone.
        clock: of the target, with the drafting of sources that take time; by default measured.
    """
    clock = clock or target_clock(target)
    sizes = sizes_for(target)
    compiled = isinstance(target, CompiledTarget)
    if compiled:  # every number of nodes is another graph
        sizes = [0, _best_fixed(clock, sizes, sources)]
    found = TextSource(max(sizes), corpus) if text else None
    return BlendedDrafter(
        clock, sizes, text=found, sources=sources, chain_only=chain_only, padded=compiled
    )


def unvarying(
    nodes: int | None,
    target: TargetModel,
    sources: Sequence[Source] = (),
    *,
    text: bool = True,
    corpus: CorpusIndex | None = None,
    chain_only: bool = False,
) -> BlendedDrafter:
    """A drafter all of whose trees have as many nodes, and which goes by no clock: of one text it
    always makes the same steps. It learns while it drafts, so that every text needs a new one.

    Args:
        nodes: that are drafted; None for a number that usually pays.
        target, sources, text, corpus, chain_only: see `automatic`.
    """
    if nodes is None:
        nodes = min(_UNVARYING, room(target) - 1)
    return BlendedDrafter(
        Clock.flat(),
        (nodes,),
        text=TextSource(nodes, corpus) if text else None,
        sources=sources,
        always=True,
        chain_only=chain_only,
        padded=True,
    )


def with_heads(
    tree: str,
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics,
    *,
    corpus: CorpusIndex | None = None,
    chain_only: bool = False,
    deterministic: bool = False,
) -> Drafter:
    """The drafter of a tree that blends.

    Args:
        tree: the words.
        target, heads, statistics: that belong together.
        corpus: continued as well as the text itself; None for none.
        chain_only: the target verifies chains alone.
        deterministic: see `unvarying`.

    Raises:
        ValueError: an unknown form, or a tree that does not fit the heads.
    """
    if tree == "auto":
        recycling: list[Source] = [] if chain_only else [RecyclingSource(target.vocab_size)]
        own: HeadsSource | TreeSource = HeadsSource(heads, statistics)
        if heads.sequential:
            sizes = (_UNVARYING,) if deterministic else _SEQUENTIAL
            clock = Clock.flat() if deterministic else target_clock(target)
            own = _sequential(heads, statistics, clock, [n for n in sizes if n < room(target)])
        if deterministic:
            sources = [*recycling, own]
            return unvarying(None, target, sources, corpus=corpus, chain_only=chain_only)
        drafter = make_drafter("static:1", heads, statistics)
        if isinstance(own, TreeSource):
            drafter = own.drafter
        kind = heads.config.to_dict() | {"preview": heads.previews is not None}
        kind |= {"nodes": drafter.num_nodes}
        return automatic(
            target,
            [*recycling, own],
            corpus=corpus,
            chain_only=chain_only,
            clock=target_clock(target, {own.name: (drafter, kind)}),
        )
    drafter = make_drafter(tree.removesuffix(SUFFIX), heads, statistics, with_log_probs=True)
    if drafter.num_nodes == 1 or isinstance(drafter, BlendedDrafter):
        raise ValueError(f"{tree!r} leaves the heads nothing to draft: use 'suffix'")
    nodes = drafter.num_nodes - 1
    sources = [TreeSource(drafter, heads.config.num_heads, statistics=statistics)]
    if deterministic or isinstance(target, CompiledTarget):
        return unvarying(nodes, target, sources, corpus=corpus)
    text = TextSource(nodes, corpus)
    return BlendedDrafter(Clock.flat(), range(nodes + 1), text=text, sources=sources, always=True)


def _sequential(
    heads: DraftHeads, statistics: HeadStatistics, clock: Clock, sizes: Sequence[int]
) -> TreeSource:
    """Heads that see each other draft a tree level by level: one of a size that may pay here."""
    speeds = {
        nodes: statistics.expected_tokens_per_step(nodes) / clock.step(nodes + 1)
        for nodes in sizes
        if nodes <= len(statistics.paths)
    }
    nodes = max(speeds, key=speeds.__getitem__, default=1)
    drafter = make_drafter(f"static:{nodes}", heads, statistics, with_log_probs=True)
    return TreeSource(drafter, heads.config.num_heads, statistics=statistics)


def _best_fixed(clock: Clock, sizes: Sequence[int], sources: Sequence[Source]) -> int:
    """The size that most tokens a second are expected of, where all steps have the same."""

    def speed(size: int) -> float:
        accepted = max([source.expected(size) for source in sources], default=0.0)
        accepted = max(accepted, 1.5 * size / (size + 4.0))  # what a text says of itself
        return (1.0 + accepted) / clock.step(size + 1)

    return max((size for size in sizes if size), key=speed)
