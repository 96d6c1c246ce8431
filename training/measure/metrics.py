"""From the ranks of an evaluation to the figures people read.

Shapes: B batch or sequences, T tokens, K heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medusa_heads.trees.statistics import HeadStatistics, simulate_tokens_per_step

TREE_SIZES = (16, 32)
OWN_FIGURES = ("loss", "loss_before", "kl")  # of a target that learns too


def complete_runs(ranks_BTK: Tensor) -> list[Tensor]:
    """The stretches [T_s, K] of each sequence in which every head has a true token."""
    runs: list[Tensor] = []
    for ranks_TK in ranks_BTK:
        complete_T = (ranks_TK >= 0).all(dim=1)
        edges = torch.diff(complete_T.int(), prepend=torch.zeros(1), append=torch.zeros(1))
        bounds = edges.nonzero().flatten().tolist()
        runs += [ranks_TK[a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
    return runs


def rank_statistics(ranks_BTK: Tensor) -> HeadStatistics:
    """Head statistics over all positions of an evaluation."""
    return HeadStatistics.from_ranks(ranks_BTK.flatten(0, 1))


def rank_metrics(ranks_BTK: Tensor) -> dict[str, float]:
    """`head0_top1`, `head0_top5`, .. and `tokens_per_step_16`, `tokens_per_step_32`.

    Tokens per step are simulated: the same sequences are walked with the best static tree that
    their own ranks imply. With thousands of positions for a few dozen nodes that flatters little.
    """
    statistics, runs = rank_statistics(ranks_BTK), complete_runs(ranks_BTK)
    figures = {
        f"head{i}_top{k}": accuracy
        for k in (1, 5)
        for i, accuracy in enumerate(statistics.top_k_accuracy(k))
    }
    for size in TREE_SIZES:
        simulated = simulate_tokens_per_step(runs, statistics.choices(size))
        figures[f"tokens_per_step_{size}"] = simulated
    return figures


def describe(metrics: Mapping[str, Any]) -> str | None:
    """One readable line out of `rank_metrics`, as the Trainer named them; None where the metrics
    are others."""
    if "eval_head0_top1" not in metrics:
        return None

    def of_heads(k: int) -> str:
        names = (f"eval_head{i}_top{k}" for i in range(len(metrics)))
        return " ".join(f"{metrics[name]:.3f}" for name in names if name in metrics)

    steps = ", ".join(
        f"{metrics[f'eval_tokens_per_step_{size}']:.2f} with {size} nodes" for size in TREE_SIZES
    )
    return f"held-out top-1 {of_heads(1)} | top-5 {of_heads(5)} | tokens per step {steps}"


def own_figures(metrics: Mapping[str, Any]) -> dict[str, float] | None:
    """How the target itself did, with its adapter and without; None where it did not learn."""
    if "eval_target_loss" not in metrics:
        return None
    return {name: metrics[f"eval_target_{name}"] for name in OWN_FIGURES}


def describe_own(figures: Mapping[str, float]) -> str:
    """`own_figures` in a line."""
    now, before = figures["loss"], figures["loss_before"]
    return (
        f"the target's own held-out loss {now:.4f}, without adapter {before:.4f} "
        f"({now / before - 1:+.2%}), KL {figures['kl']:.4f}"
    )
