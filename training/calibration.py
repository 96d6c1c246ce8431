"""Honest probabilities: a temperature for each head, and what dynamic trees gain by them.

Shapes: B batch, R supervised rows, S measured positions, K heads, C candidate ranks, G
temperatures tried, D hidden, V vocabulary.
Source: Guo et al. 2017, "On calibration of modern neural networks", arXiv:1706.04599, section 4.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.dynamic_tree import DYNAMIC_RANKS, DYNAMIC_SIZES, expected_tokens_per_step
from medusa_heads.heads import MedusaHeads
from medusa_heads.statistics import HeadStatistics
from medusa_heads.target import TargetModel
from medusa_heads.training.data import collate
from medusa_heads.training.rows import gather_hidden, supervised_rows

if TYPE_CHECKING:
    from datasets import Dataset

TEMPERATURES = tuple(0.5 * 1.1**step for step in range(18))  # 0.5 to 2.5
MAX_POSITIONS = 4096  # enough for one number a head, and a second's work
_BATCH = 8
_LOGITS_AT_ONCE = 1 << 24


@torch.no_grad()
def calibrate(
    statistics: HeadStatistics, heads: MedusaHeads, target: TargetModel, held_out: Dataset
) -> None:
    """Fit the temperatures by held-out likelihood, and measure dynamic trees with them.

    Both are written into `statistics`. Only positions with a true token for every head count.
    """
    parts = []
    positions = 0
    for start in range(0, len(held_out), _BATCH):
        rows = [held_out[i] for i in range(start, min(start + _BATCH, len(held_out)))]
        batch = {name: tensor.to(target.device) for name, tensor in collate(rows).items()}
        rows_R, labels_RK = supervised_rows(batch["labels"], heads.config.num_heads)
        complete_R = (labels_RK >= 0).all(dim=1)
        hidden_BTD = target.hidden(batch["input_ids"], batch["attention_mask"])
        hidden_RD = gather_hidden(hidden_BTD, rows_R[complete_R])
        labels_RK = labels_RK[complete_R]
        step = max(1, _LOGITS_AT_ONCE // (labels_RK.shape[1] * target.vocab_size))
        for hidden, labels in zip(hidden_RD.split(step), labels_RK.split(step), strict=True):
            parts.append(_measure(heads(hidden).float(), labels))
        positions += len(labels_RK)
        if positions >= MAX_POSITIONS:
            break
    if not positions:
        return
    best_SKC, true_SK, ranks_SK, totals_SKG = (torch.cat(part) for part in zip(*parts, strict=True))
    grid_G = torch.tensor(TEMPERATURES, device=true_SK.device)
    losses_KG = (totals_SKG - true_SK[:, :, None] / grid_G).mean(dim=0)
    chosen_K = losses_KG.argmin(dim=1)
    statistics.temperatures = grid_G[chosen_K].tolist()
    totals_SK = totals_SKG.gather(2, chosen_K[None, :, None].expand(len(totals_SKG), -1, 1))[..., 0]
    log_probs_SKC = best_SKC / grid_G[chosen_K][None, :, None] - totals_SK[..., None]
    ranks = best_SKC.shape[2]
    most = sum(ranks ** (level + 1) for level in range(best_SKC.shape[1]))
    statistics.dynamic_tokens_per_step = {
        size: expected_tokens_per_step(log_probs_SKC, ranks_SK, size)
        for size in DYNAMIC_SIZES
        if size <= most
    }


def _measure(logits_RKV: Tensor, labels_RK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row: best logits [R, K, C], the true token's logit and rank [R, K], and the
    log-normaliser at each temperature [R, K, G]."""
    best_RKC = logits_RKV.topk(min(DYNAMIC_RANKS, logits_RKV.shape[2]), dim=-1).values
    true_RK = logits_RKV.gather(2, labels_RK[:, :, None])[..., 0]
    ranks_RK = (logits_RKV > true_RK[..., None]).sum(dim=-1)
    totals_RKG = torch.stack([(logits_RKV / t).logsumexp(dim=-1) for t in TEMPERATURES], dim=-1)
    return best_RKC, true_RK, ranks_RK, totals_RKG
