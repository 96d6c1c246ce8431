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
from medusa_heads.training.rows import IGNORED, gather_hidden, supervised_rows

if TYPE_CHECKING:
    from datasets import Dataset

TEMPERATURES = tuple(0.5 * 1.1**step for step in range(18))  # 0.5 to 2.5
MAX_POSITIONS = 4096  # enough for one number a head, and a few seconds' work
_WELL_SO_FAR = 2  # a head's draft is looked at where the heads before it held the truth this high
_BATCH = 8
_LOGITS_AT_ONCE = 1 << 24


@torch.no_grad()
def calibrate(
    statistics: HeadStatistics, heads: MedusaHeads, target: TargetModel, held_out: Dataset
) -> None:
    """Fit the temperatures by held-out likelihood, and measure dynamic trees with them.

    Both are written into `statistics`. Only positions with a true token for every head count; where
    there are more than MAX_POSITIONS, they are taken evenly from all of the text.

    A head's node is reached only where the heads before it were right, and there it is surer than
    elsewhere. Its temperature is therefore fitted on positions where the true tokens were among the
    earlier heads' best two.
    """
    supervised = sum(sum(label != IGNORED for label in row) for row in held_out["labels"])
    every = -(-supervised // MAX_POSITIONS)
    parts = []
    for start in range(0, len(held_out), _BATCH):
        rows = [held_out[i] for i in range(start, min(start + _BATCH, len(held_out)))]
        batch = {name: tensor.to(target.device) for name, tensor in collate(rows).items()}
        rows_R, labels_RK = supervised_rows(batch["labels"], heads.config.num_heads)
        taken_R = (labels_RK != IGNORED).all(dim=1).nonzero().flatten()[::every]
        hidden_BTD = target.hidden(batch["input_ids"], batch["attention_mask"])
        hidden_RD = gather_hidden(hidden_BTD, rows_R[taken_R])
        labels_RK = labels_RK[taken_R]
        step = max(1, _LOGITS_AT_ONCE // (labels_RK.shape[1] * target.vocab_size))
        for hidden, labels in zip(hidden_RD.split(step), labels_RK.split(step), strict=True):
            parts.append(_measure(heads(hidden).float(), labels))
    if not parts:
        return
    best_SKC, true_SK, ranks_SK, totals_SKG = (torch.cat(part) for part in zip(*parts, strict=True))
    grid_G = torch.tensor(TEMPERATURES, device=true_SK.device)
    losses_SKG = totals_SKG - true_SK[:, :, None] / grid_G
    chosen_K = torch.stack(
        [
            losses_SKG[_reached(ranks_SK[:, :head]), head].mean(dim=0).argmin()
            for head in range(ranks_SK.shape[1])
        ]
    )
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


def _reached(earlier_ranks_SH: Tensor) -> Tensor:
    """The positions to look at: those where the earlier heads did well, if there are enough."""
    well_S = (earlier_ranks_SH < _WELL_SO_FAR).all(dim=1)
    return well_S if well_S.sum() >= 64 else torch.ones_like(well_S)


def _measure(logits_RKV: Tensor, labels_RK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row: best logits [R, K, C], the true token's logit and rank [R, K], and the
    log-normaliser at each temperature [R, K, G]."""
    best_RKC = logits_RKV.topk(min(DYNAMIC_RANKS, logits_RKV.shape[2]), dim=-1).values
    true_RK = logits_RKV.gather(2, labels_RK[:, :, None])[..., 0]
    ranks_RK = (logits_RKV > true_RK[..., None]).sum(dim=-1)
    totals_RKG = torch.stack([(logits_RKV / t).logsumexp(dim=-1) for t in TEMPERATURES], dim=-1)
    return best_RKC, true_RK, ranks_RK, totals_RKG
