"""What a draft model would gain its target, measured on held-out text.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.training.measure.metrics import complete_runs
from medusa_heads.trees.statistics import simulate_tokens_per_step

CHAINS = tuple(range(1, 9))


def draft_metrics(figures_BT3: Tensor) -> dict[str, float]:
    """Means over all held-out positions, and simulated tokens per step.

    `figures_BT3` hold at every position -100, or: sum min(p, q) over the vocabulary, whether the
    likeliest tokens of target and draft are the same, and whether the draft's likeliest token is
    the text's next one. Of them are made `acceptance`, the chance that a token drawn from q
    survives the rejection rule (Leviathan et al. 2022, arXiv:2211.17192, corollary 3.6),
    `agreement`, and `tokens_per_step_1`, .., `tokens_per_step_8`, what greedy chains of these
    lengths would have reached on the very text, bonus token included.
    """
    known_BT = figures_BT3[..., 0] != IGNORED
    acceptance, agreement, _ = figures_BT3[known_BT].double().mean(dim=0).tolist()
    figures = {"acceptance": acceptance, "agreement": agreement}
    # Rank 0 is the draft's likeliest token; a chain of n is a tree of nothing but such ranks.
    ranks_BT = torch.where(known_BT, 1 - figures_BT3[..., 2], IGNORED).long()
    padded_BT = F.pad(ranks_BT, (0, CHAINS[-1] - 1), value=IGNORED)
    runs = complete_runs(padded_BT.unfold(1, CHAINS[-1], 1))
    for length in CHAINS:
        chain = [(0,) * (depth + 1) for depth in range(length)]
        figures[f"tokens_per_step_{length}"] = simulate_tokens_per_step(runs, chain)
    return figures


def describe_draft(metrics: Mapping[str, Any]) -> str | None:
    """One readable line out of `draft_metrics`; None where the metrics are others."""
    if "eval_acceptance" not in metrics:
        return None
    steps = ", ".join(
        f"{metrics[f'eval_tokens_per_step_{length}']:.2f} with {length}" for length in (2, 4, 8)
    )
    return (
        f"held-out acceptance {metrics['eval_acceptance']:.3f}, agreement "
        f"{metrics['eval_agreement']:.3f} | tokens per step {steps} drafted"
    )
