"""What speculation gains: expected tokens a step, and speed-up, from acceptance and from costs; and
what heads and their trees take, in bytes.

A chain of drafts in theory is as in Leviathan et al. 2022 ("Fast inference from transformers via
speculative decoding", arXiv:2211.17192): every draft is accepted with the same chance, whatever
was accepted before, and verifying the whole chain takes as long as one token does. Chains and trees
of trained heads go by what was measured instead: the heads' ranks on held-out text, and the seconds
of a step on this machine.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from medusa_heads.heads import DraftHeads, MedusaHeads
from medusa_heads.heads.drafting import near_layers
from medusa_heads.heads.medusa import ResBlock, WideBlock
from medusa_heads.inference.adapt.measure import DEFAULT_CONTEXT
from medusa_heads.inference.plan.tree_size import (
    TreeSize,
    chain_chances,
    expected_tokens,
    measured_sizes,
    read_as,
    tune,
)
from medusa_heads.machine.facts import as_used, describe_machine
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics

_LONGEST_CHAIN = 64


def chain_tokens(acceptance: float, length: int) -> float:
    """Expected tokens a step of a chain of `length` drafts, each of which is accepted behind
    accepted ones with the chance `acceptance`: equation 1 of Leviathan et al. Raises ValueError: an
    acceptance that is no chance, or a length below 0."""
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must lie between 0 and 1, got {acceptance}")
    if length < 0:
        raise ValueError(f"a chain has at least 0 drafts, got {length}")
    # The geometric series itself: its closed form divides by 0 where all is accepted.
    return math.fsum(acceptance**i for i in range(length + 1))


def chain_speedup(acceptance: float, length: int, draft_cost: float) -> float:
    """How many times as fast as plain decoding such a chain is, where one draft takes `draft_cost`
    forwards of the target: theorem 3.8 of Leviathan et al. Raises ValueError: an acceptance that is
    no chance, a length or a cost below 0."""
    if not 0 <= draft_cost < math.inf:
        raise ValueError(f"draft_cost must be at least 0 forwards of the target, got {draft_cost}")
    return chain_tokens(acceptance, length) / (length * draft_cost + 1)


def best_chain_length(acceptance: float, draft_cost: float, longest: int = _LONGEST_CHAIN) -> int:
    """The length with the largest speed-up, 0 where drafting does not pay; the shorter of equals.

    It pays exactly where acceptance is above the cost (corollary 3.9). Raises ValueError: as
    `chain_speedup`."""
    return max(range(longest + 1), key=lambda length: chain_speedup(acceptance, length, draft_cost))


def mean_acceptance(chances: Sequence[float]) -> float:
    """Accepted drafts over those that were tried, a draft being tried once all before it were
    accepted: the one chance that stands for all of them in equation 1. `chances` are as
    `chain_chances` gives them."""
    return math.fsum(chances) / (1.0 + math.fsum(chances[:-1]))


def break_even(batch_sizes: Sequence[int], speedups: Sequence[float]) -> float | None:
    """The batch size up to which drafting pays, between measured ones, which ascend, on a
    logarithmic scale: 0.0 where it does not even at the smallest, None where it does at all."""
    assert sorted(batch_sizes) == list(batch_sizes)
    if speedups[0] <= 1:
        return 0.0
    for (small, gain), (large, loss) in pairwise(zip(batch_sizes, speedups, strict=True)):
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
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    chain_only: bool = False,
    refresh: bool = False,
) -> dict[str, Any]:
    """All of it for heads on this machine, as plain values: expected speed-ups by batch size, from
    the heads' measured ranks and the seconds of steps with so many tokens in the cache. Trees are
    left out with `chain_only`, and `refresh` measures anew. Raises ValueError: no batch size or one
    below 1, or a context that does not fit the target."""
    sizes = sorted(set(batch_sizes))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"expected batch sizes of at least 1, got {list(batch_sizes)}")
    chances = chain_chances(statistics)
    expected = expected_tokens(statistics, chain_only=True)
    kind = read_as(heads) | {"chains": len(chances)}
    batches, beside_others = [], False
    for rows in sizes:
        where: dict[str, Any] = {"context": context, "batch_size": rows, "refresh": refresh}
        chains = measured_sizes(target, heads, statistics, expected, kind, **where)
        trees = [] if chain_only else tune(target, heads, statistics, **where)
        batches.append(_batch(rows, chains, trees))
        beside_others |= any(size.beside_others for size in (*chains, *trees))
    report: dict[str, Any] = {
        "target": target.name_or_path,
        # What scripts/grown/target.py made costs as much as its size says, but guesses as small.
        "grown_from": getattr(target.config, "grown_from", None),
        "dtype": str(target.dtype).removeprefix("torch."),
        "context": context,
        "machine": as_used(describe_machine(), target.device),
        "beside_others": beside_others,  # as some steps were measured
        "positions": statistics.positions,
        "acceptance": (acceptance := mean_acceptance(chances)),
        "top_1": statistics.top_k_accuracy(1),
        "batches": batches,
    }
    if sizes[0] == 1:
        # Beside equation 1 and theorem 3.8, which take verification for free.
        report["chains"] = [
            {
                **chain,
                "length": chain["nodes"],
                "equation_1": chain_tokens(acceptance, chain["nodes"]),
                "theorem_3_8": chain_speedup(acceptance, chain["nodes"], chain["draft_cost"]),
            }
            for chain in batches[0]["chains"]
        ]
    report["break_even_batch_size"] = break_even(
        sizes, [batch["best"]["speedup"] for batch in batches]
    )
    return report


def _batch(rows: int, chains: Sequence[TreeSize], trees: Sequence[TreeSize]) -> dict[str, Any]:
    # Each is compared with plain decoding of its own measurement: machines change their speed.
    described = [
        [_describe(size, sizes[0]) for size in sizes if size.nodes] for sizes in (chains, trees)
    ]
    return {
        "batch_size": rows,
        "plain_step_seconds": (trees or chains)[0].step_seconds,
        "chains": described[0],
        "trees": described[1],
        "best": max((*described[0], *described[1]), key=lambda entry: entry["speedup"]),
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


def memory_overhead(
    target: TargetModel, heads: DraftHeads, nodes: int, batch_size: int = 1
) -> dict[str, int]:
    """Bytes of each part, where so many rows draft so many nodes each; the root of a tree is what
    plain decoding would run as well."""
    per_token = cache_bytes_per_token(target)
    drafted = nodes * batch_size
    prefix = heads.prefix
    return {
        "target": bytes_of(target.model.parameters()) + target.packed_bytes,
        "heads": heads_bytes(heads),
        "cache_per_token": per_token,  # the target's keys and values
        # Those of the heads' own layers, if they have any.
        "prefix_per_token": prefix.held_per_token * prefix.dtype.itemsize if prefix else 0,
        "tree_cache": drafted * per_token,  # held until the walk has dropped most of its rows
        "tree_logits": drafted * target.vocab_size * target.dtype.itemsize,  # of the target
    }


@torch.inference_mode()
def cache_bytes_per_token(target: TargetModel) -> int:
    """Of the rows in all layers, seen on a token that the target really reads."""
    cache = target.new_cache()
    ids_BT = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    target.hidden(ids_BT, cache=cache)
    return bytes_of(rows for layer in cache.row_layers for rows in layer.rows())


def heads_bytes(heads: DraftHeads) -> int:
    """With the second copy of their blocks that all but sequential heads keep in one piece while
    they decode, but in eight bits; the rows that a reduced vocabulary copies, the preview of a
    large one, and what is held in eight bits or packed."""
    total = bytes_of(heads.parameters())
    if isinstance(heads, MedusaHeads):
        blocks = (block for block in heads.modules() if isinstance(block, ResBlock | WideBlock))
        in_one_piece = (block for block in blocks if type(block.linear) is nn.Linear)
        total += bytes_of(p for block in in_one_piece for p in block.parameters())
    if heads.draft_tokens is not None and heads.config.vocab_matrix == "shared":
        total += bytes_of([heads.vocab_matrix(0)[0]])
    total += bytes_of(tensor for preview in heads.previews or () for tensor in preview.held)
    return total + sum(layer.held for layer in near_layers(heads))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
