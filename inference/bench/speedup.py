"""What speculation gains: expected tokens a step, and speed-up, from acceptance and from costs.

A chain of drafts in theory is as in Leviathan et al. 2022 ("Fast inference from transformers via
speculative decoding", arXiv:2211.17192): every draft is accepted with the same chance, whatever
was accepted before, and verifying the whole chain takes as long as one token does. Chains and trees
of trained heads go by what was measured instead: the heads' ranks on held-out text, and the seconds
of a step on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from medusa_heads.heads import DraftHeads
from medusa_heads.inference.adapt.measure import DEFAULT_CONTEXT, step_seconds
from medusa_heads.inference.plan.tree_size import TreeSize, tune
from medusa_heads.inference.plan.trees import make_drafter
from medusa_heads.machine import describe_machine
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics

DEFAULT_BATCH_SIZES = (1, 2, 4, 8)
LONGEST_CHAIN = 64


def chain_tokens(acceptance: float, length: int) -> float:
    """Expected tokens a step of a chain of `length` drafts: equation 1 of Leviathan et al.

    Args:
        acceptance: the chance that a draft behind accepted ones is accepted.
        length: drafts in the chain; 0 is plain decoding, one token a step.

    Raises:
        ValueError: an acceptance that is no chance, or a length below 0.
    """
    _check_chance(acceptance)
    if length < 0:
        raise ValueError(f"a chain has at least 0 drafts, got {length}")
    # The geometric series itself: its closed form divides by 0 where all is accepted.
    return math.fsum(acceptance**i for i in range(length + 1))


def chain_speedup(acceptance: float, length: int, draft_cost: float) -> float:
    """How many times as fast as plain decoding: theorem 3.8 of Leviathan et al.

    Args:
        acceptance: the chance that a draft behind accepted ones is accepted.
        length: drafts in the chain.
        draft_cost: what one draft takes, in forwards of the target.

    Raises:
        ValueError: an acceptance that is no chance, a length or a cost below 0.
    """
    if not 0 <= draft_cost < math.inf:
        raise ValueError(f"draft_cost must be at least 0 forwards of the target, got {draft_cost}")
    return chain_tokens(acceptance, length) / (length * draft_cost + 1)


def best_chain_length(acceptance: float, draft_cost: float, longest: int = LONGEST_CHAIN) -> int:
    """The length with the largest speed-up, 0 where drafting does not pay; the shorter of equals.

    It pays exactly where acceptance is above the cost (corollary 3.9).

    Raises:
        ValueError: as `chain_speedup`.
    """
    return max(range(longest + 1), key=lambda length: chain_speedup(acceptance, length, draft_cost))


def chain_chances(statistics: HeadStatistics) -> list[float]:
    """The chance that the first 1, 2, .. best guesses of the heads are all right."""
    counts = dict(statistics.paths)
    chances = []
    for depth in range(1, statistics.num_heads + 1):
        # What is so rare that no path was kept for it counts as never.
        chances.append(counts.get((0,) * depth, 0) / statistics.positions)
    return chances


def mean_acceptance(chances: Sequence[float]) -> float:
    """Accepted drafts over those that were tried, a draft being tried once all before it were
    accepted: the one chance that stands for all of them in equation 1.

    Args:
        chances: that the first 1, 2, .. drafts are all right.
    """
    tried = 1.0 + math.fsum(chances[:-1])
    return math.fsum(chances) / tried


def break_even(batch_sizes: Sequence[int], speedups: Sequence[float]) -> float | None:
    """The batch size up to which drafting pays, between measured ones on a logarithmic scale.

    Args:
        batch_sizes: ascending.
        speedups: of each over plain decoding of the same batch.

    Returns:
        0.0 where it does not pay even at the smallest size, None where it pays at all of them.
    """
    assert len(batch_sizes) == len(speedups) and sorted(batch_sizes) == list(batch_sizes)
    if speedups[0] <= 1:
        return 0.0
    pairs = list(zip(batch_sizes, speedups, strict=True))
    for (small, gain), (large, loss) in pairwise(pairs):
        if loss <= 1:
            share = (gain - 1) / (gain - loss)
            return float(small * (large / small) ** share)
    return None


def analyze(
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics,
    *,
    context: int = DEFAULT_CONTEXT,
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    chain_only: bool = False,
    refresh: bool = False,
) -> dict[str, Any]:
    """All of it for heads on this machine, as plain values.

    Args:
        target: the target.
        heads: attached to it.
        statistics: measured ranks of the heads.
        context: tokens in the cache while steps are measured.
        batch_sizes: sequences decoded together; the costs of each are measured.
        chain_only: the target verifies chains alone, so trees are left out.
        refresh: measure even if an earlier measurement is on disk.

    Raises:
        ValueError: no batch size or one below 1, or a context that does not fit the target.
    """
    sizes = sorted(set(batch_sizes))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"expected batch sizes of at least 1, got {list(batch_sizes)}")
    batches = []
    for rows in sizes:
        chains = _chain_sizes(target, heads, statistics, context, rows, refresh)
        trees: list[TreeSize] = []
        if not chain_only:
            trees = tune(
                target, heads, statistics, context=context, batch_size=rows, refresh=refresh
            )
        batches.append(_batch(rows, chains, trees))
    report: dict[str, Any] = {
        "target": target.name_or_path,
        # What scripts/grown/target.py made costs as much as its size says, but guesses as small.
        "grown_from": getattr(target.config, "grown_from", None),
        "dtype": str(target.dtype).removeprefix("torch."),
        "context": context,
        "machine": describe_machine(),
        "positions": statistics.positions,
        "acceptance": mean_acceptance(chain_chances(statistics)),
        "top_1": statistics.top_k_accuracy(1),
        "batches": batches,
    }
    if sizes[0] == 1:
        report["chains"] = _against_theory(batches[0]["chains"], report["acceptance"])
    report["break_even_batch_size"] = break_even(
        sizes, [batch["best"]["speedup"] for batch in batches]
    )
    return report


def _chain_sizes(
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics,
    context: int,
    rows: int,
    refresh: bool,
) -> list[TreeSize]:
    """Plain decoding and the chains of 1, 2, .. heads, with their measured steps."""
    chances = chain_chances(statistics)
    expected = {"none": 1.0} | {
        f"chain:{depth}": 1 + math.fsum(chances[:depth]) for depth in range(1, len(chances) + 1)
    }
    drafters = {tree: make_drafter(tree, heads, statistics) for tree in expected}
    kind = heads.config.to_dict() | {"chains": len(chances)}
    seconds = step_seconds(target, drafters, kind, context, rows, refresh=refresh)
    return [
        TreeSize(tree, seconds[tree].step, tokens, seconds[tree].drafting)
        for tree, tokens in expected.items()
    ]


def _batch(rows: int, chains: Sequence[TreeSize], trees: Sequence[TreeSize]) -> dict[str, Any]:
    described = [
        # Each is compared with plain decoding of its own measurement: machines change their speed.
        [_describe(size, sizes[0]) for size in sizes if size.nodes]
        for sizes in (chains, trees)
    ]
    drafted = [entry for entries in described for entry in entries]
    return {
        "batch_size": rows,
        "plain_step_seconds": (trees or chains)[0].step_seconds,
        "chains": described[0],
        "trees": described[1],
        "best": max(drafted, key=lambda entry: entry["speedup"]),
    }


def _describe(size: TreeSize, plain: TreeSize) -> dict[str, Any]:
    return {
        "tree": size.tree,
        "nodes": size.nodes,
        "tokens_per_step": size.tokens_per_step,
        "step_seconds": size.step_seconds,
        "drafting_seconds": size.drafting_seconds,
        "draft_cost": size.drafting_seconds / size.nodes / plain.step_seconds,
        "speedup": size.tokens_per_second / plain.tokens_per_second,
    }


def _against_theory(chains: Sequence[Mapping[str, Any]], acceptance: float) -> list[dict[str, Any]]:
    """Measured chains beside equation 1 and theorem 3.8, which take verification for free."""
    return [
        {
            **chain,
            "length": chain["nodes"],
            "equation_1": chain_tokens(acceptance, chain["nodes"]),
            "theorem_3_8": chain_speedup(acceptance, chain["nodes"], chain["draft_cost"]),
        }
        for chain in chains
    ]


def _check_chance(value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"acceptance must lie between 0 and 1, got {value}")
