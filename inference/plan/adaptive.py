"""Which drafter for which request: of heads, and of drafters that choose how much to draft.

auto            as many nodes as pay at each step on this machine, of the heads and of the text
fastest         the tree of the heads alone that this machine decodes one row fastest with
16+suffix       a tree's likeliest nodes, some of them given to what the text itself suggests
suffix, recycling, auto without heads, and so on: see models/training_free.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from medusa_heads.heads import DraftHeads
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.lessons import Lessons
from medusa_heads.inference.adapt.measure import room, sizes_for, target_clock, target_facts
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.growing import Source
from medusa_heads.inference.drafters.head_trees import DynamicDrafter
from medusa_heads.inference.drafters.heads import HeadsSource, TreeSource
from medusa_heads.inference.drafters.merged import MergedTrees, Part
from medusa_heads.inference.drafters.recycling import RecycledTrees, RecyclingSource
from medusa_heads.inference.drafters.text import TextSource
from medusa_heads.inference.lookup.corpus_index import CorpusIndex
from medusa_heads.inference.plan.tree_size import best_tree, read_as
from medusa_heads.inference.plan.trees import TreeSpec, make_drafter, parse_tree, read_shape
from medusa_heads.target.graphs.captured import CapturedTarget
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.recurrent import is_recurrent
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics, prior_statistics

FASTEST, SUFFIX = "fastest", "+suffix"
_COMPARING = ("threshold", "log_ratio")  # rules that compare with the draft's own probabilities
_CHAIN = 7  # nodes of one that all steps have: with the root a power of two
_UNVARYING = 15  # nodes; with the root a multiple of what matrix units take at a time
_GRAPHS = {7, 15}  # nodes of what is compiled, besides none and the number that pays most
_FEW = 7  # nodes of a tree beside which others draft
_SEQUENTIAL = (3, 7, 15, 23, 31)  # nodes of the trees that heads which see each other may draft


def blends(tree: TreeSpec) -> bool:
    """Whether a tree's words ask for the text's own drafts beside the heads'."""
    return tree == "auto" or str(tree).endswith(SUFFIX)


def continues_text(tree: TreeSpec) -> bool:
    """Whether a tree, or a drafter without heads, drafts what followed where the text ended as it
    does now."""
    return blends(tree) or str(tree).partition(":")[0] == "suffix"


def check_tree(tree: TreeSpec, *, acceptance: str = "lossless", corpus: bool = False) -> None:
    """Refuse a tree of heads that no target and no heads could be drafted with. Raises ValueError:
    an unknown form, or one that does not go with the acceptance rule or continues no corpus."""
    if tree in ("auto" + SUFFIX, FASTEST + SUFFIX):
        raise ValueError(
            f"the tree auto has {SUFFIX} in it already, and fastest is of heads alone, got "
            f"{tree!r}: use 'auto', or N{SUFFIX}"
        )
    plain = "none" if tree in ("auto", FASTEST) else _without_suffix(tree)
    kind, _ = parse_tree(plain)
    empty = read_shape(plain).num_nodes == 1 if kind == "paths" else kind in ("none", "suffix")
    if empty and str(tree).endswith(SUFFIX):
        raise ValueError(f"{tree!r} leaves the heads nothing to draft: use 'suffix'")
    if acceptance in _COMPARING and str(tree).endswith(SUFFIX):
        raise ValueError(
            f"what the text suggests has no probability, which {acceptance} acceptance compares "
            f"with, got the tree {tree!r}: leave {SUFFIX!r} out"
        )
    if corpus and not continues_text(tree):
        raise ValueError(
            f"a corpus is continued by the trees auto, N+suffix and suffix, and the tree "
            f"here is {tree!r}: use one of them, or leave the corpus out"
        )


def _without_suffix(tree: TreeSpec) -> TreeSpec:
    return tree.removesuffix(SUFFIX) if isinstance(tree, str) else tree


def blended(
    target: TargetModel,
    sources: Sequence[Source] = (),
    *,
    text: bool = True,
    corpus: CorpusIndex | None = None,
    chain_only: bool = False,
    clock: Clock | None = None,
    deterministic: bool = False,
    nodes: int | None = None,
) -> BlendedDrafter:
    """A drafter that verifies at every step as many nodes as pay on this machine.

    Args:
        sources: what may be asked besides the text.
        text: whether the text itself is drafted from.
        corpus: continued as well; None for none.
        chain_only: the target verifies chains alone.
        clock: of the target, with the drafting of sources that take time; by default measured.
        deterministic: it goes by no clock, and all trees have as many nodes: of one text it always
            makes the same steps. It learns while it drafts, so that every text needs a new one.
        nodes: how many these are; by default a number that usually pays.
    """
    compiled, lessons = target.one_shape, None
    if deterministic:
        clock, sizes = Clock.flat(), [nodes or min(_UNVARYING, room(target) - 1)]
    else:
        clock, sizes = clock or target_clock(target), sizes_for(target)
        if compiled:  # every number of nodes is another graph
            sizes = _graphs(clock, sizes, sources)
    own = TextSource(max(sizes), corpus) if text else None
    if not deterministic:
        asked = {each.name: dict(each.facts) for each in (own, *sources) if each}
        facts = {"name": target.name_or_path, "compiled": compiled, "sources": asked}
        lessons = Lessons(target_facts(target) | facts)
    return BlendedDrafter(
        clock,
        sizes,
        text=own,
        sources=sources,
        always=deterministic,
        chain_only=chain_only,
        padded=deterministic or compiled,
        lessons=lessons,
    )


def takes_whole_steps(target: TargetModel, chain_only: bool) -> bool:
    """Whether steps of this target are graphs as a whole, in which no drafter asks the host; of one
    that verifies chains alone, where states ask for that and not cache slots."""
    whole = isinstance(target, CompiledTarget) and target.whole_steps
    return whole and (not chain_only or is_recurrent(target.config))


def merged_trees(
    target: TargetModel,
    sources: Sequence[Source] = (),
    *,
    heads: DynamicDrafter | None = None,
    recycles: bool = True,
    nodes: int | None = None,
    chain_only: bool = False,
) -> MergedTrees:
    """What `blended` drafts, by tensors alone.

    Args:
        sources: what is expected of the parts, by which the nodes are chosen.
        heads: which guess as well; None for none.
        recycles: whether what the target nearly wrote is drafted from.
        nodes: how many at every step; by default a few numbers, of which each step verifies the one
            that pays most, or one number for chains.
        chain_only: the target verifies chains alone.
    """
    sizes: list[int] = []
    if nodes is None:
        clock, all_sizes = target_clock(target), sizes_for(target)
        nodes = _best_fixed(clock, all_sizes, sources)
        # Every step drafts the largest tree: one larger than usually pays would cost all of them.
        sizes = [size for size in _graphs(clock, all_sizes, sources) if size <= nodes]
        if chain_only:
            nodes, sizes = min(nodes, _CHAIN), []
    parts: list[Part] = [] if heads is None else [heads]
    if recycles:
        parts.append(RecycledTrees(target.readable, nodes))
    recorded = isinstance(target, CapturedTarget)
    return MergedTrees(parts, nodes, sizes, chain_only=chain_only, paced=recorded)


def heads_drafter(
    tree: TreeSpec,
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics | None,
    *,
    chain_only: bool = False,
    acceptance: str = "lossless",
    read_corpus: Callable[[], CorpusIndex | None] | None = None,
    deterministic: bool = False,
) -> tuple[TreeSpec, Drafter]:
    """What heads draft: which tree it is, also where `auto` chose, and its drafter. Without
    statistics a prior stands for them. Raises ValueError: an unknown form, or a tree that does not
    fit the heads, or continues no corpus.

    Args:
        tree: which one: words as above and in trees.py, or the tree itself.
        heads: as drafters read them.
        chain_only: the target verifies chains alone; of any tree its best chain is taken.
        acceptance: name of the rule that walks the trees.
        read_corpus: gives the text that drafts also continue; None for none.
        deterministic: see `blended`.
    """
    if statistics is None:
        statistics = prior_statistics(heads.config.num_heads, heads.config.num_candidates)
    compares = acceptance in _COMPARING
    if tree == FASTEST and deterministic:
        raise ValueError(
            f"tree={FASTEST!r} goes by a clock, which deterministic=True does without: name a tree"
        )
    # What the text itself suggests comes without a probability.
    if tree == FASTEST or (tree == "auto" and compares):
        tree = "dynamic:15" if deterministic else best_tree(target, heads, statistics)
    check_tree(tree, acceptance=acceptance, corpus=read_corpus is not None)
    corpus = read_corpus() if read_corpus else None  # only now: to index one may take a while
    blend = partial(blended, target, corpus=corpus, deterministic=deterministic)
    if not blends(tree):
        drafter = make_drafter(
            tree, heads, statistics, chain_only=chain_only, with_log_probs=compares, corpus=corpus
        )
        if deterministic and isinstance(drafter, BlendedDrafter):
            drafter = blend(chain_only=True, nodes=drafter.num_nodes - 1)
        return tree, drafter
    if chain_only and tree != "auto":
        raise ValueError(
            f"the tree {tree!r} needs a target that verifies branches, and this one verifies "
            "chains alone: use 'auto'"
        )
    merges = takes_whole_steps(target, chain_only) and corpus is None and not deterministic
    if tree == "auto":
        own, clock = _own_source(target, heads, statistics, deterministic)
        if merges:
            guessing = DynamicDrafter(heads, 1, temperatures=statistics.temperatures)
            recycles = not chain_only
            return tree, merged_trees(
                target, [own], heads=guessing, recycles=recycles, chain_only=chain_only
            )
        sources = [own] if chain_only else [RecyclingSource(target.readable), own]
        return tree, blend(sources, chain_only=chain_only, clock=clock)
    drafter = make_drafter(_without_suffix(tree), heads, statistics, with_log_probs=True)
    nodes = drafter.num_nodes - 1
    if merges:
        guessing = DynamicDrafter(heads, 1, temperatures=statistics.temperatures)
        return tree, merged_trees(target, heads=guessing, recycles=False, nodes=nodes)
    sources = [TreeSource(drafter, statistics)]
    if deterministic or target.one_shape:
        return tree, blend(sources, deterministic=True, nodes=nodes)
    return tree, BlendedDrafter(
        Clock.flat(), range(nodes + 1), text=TextSource(nodes, corpus), sources=sources, always=True
    )


def _own_source(
    target: TargetModel, heads: DraftHeads, statistics: HeadStatistics, deterministic: bool
) -> tuple[Source, Clock]:
    """What the heads offer beside the text, and the seconds of steps and of asking them. Heads that
    see each other draft a tree level by level: one of a size that may pay here, of the paths that
    are likeliest at this very step. Where only a correction does, more nodes cost next to nothing:
    they fill one shape, and the likeliest are verified."""
    clock, tree = Clock.flat(), "static:1"
    if heads.sequential:
        clock = clock if deterministic else target_clock(target)
        shaped = dict(statistics.dynamic_tokens_per_step) if heads.reads_drafts else {}
        kind = "dynamic" if shaped else "static"  # of heads that were not measured there is a prior
        most = min(room(target) - 1, len(statistics.paths))
        # Larger ones took longer than they gave.
        if shaped and not deterministic and target.device.type == "cpu":
            most = min(most, _FEW)
        sizes = [n for n in ((_UNVARYING,) if deterministic else _SEQUENTIAL) if n <= most]
        speeds = {
            n: shaped.get(n, statistics.expected_tokens_per_step(n)) / clock.step(n + 1)
            for n in sizes
        }
        pays = speeds.__getitem__ if heads.reads_drafts else None
        tree = f"{kind}:{max(speeds, key=pays, default=1)}"
    drafter = make_drafter(tree, heads, statistics, with_log_probs=heads.sequential)
    own = partial(TreeSource, drafter) if heads.sequential else partial(HeadsSource, heads)
    source: Source = own(statistics)
    if not deterministic:
        of = heads.config.to_dict() | read_as(heads) | {"tree": tree}
        clock = target_clock(target, {source.name: (drafter, of)})
    return source, clock


def _graphs(clock: Clock, sizes: Sequence[int], sources: Sequence[Source]) -> list[int]:
    """The sizes that are compiled, in order."""
    return sorted({0, *_GRAPHS & {*sizes}, _best_fixed(clock, sizes, sources)})


def _best_fixed(clock: Clock, sizes: Sequence[int], sources: Sequence[Source]) -> int:
    """The size that most tokens a second are expected of, where all steps have the same."""

    def speed(size: int) -> float:
        of_itself = 1.5 * size / (size + 4.0)  # what a text says
        accepted = max([of_itself, *(source.expected(size) for source in sources)])
        return (1.0 + accepted) / clock.step(size + 1)

    return max((size for size in sizes if size), key=speed)
