"""The target's own next-token loss, and how far an adapter has moved its predictions.

Shapes: B batch, T tokens, N positions with a supervised next token, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.heads import product_dtype
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.fused import Pairs, Recipe, frozen_matrix_losses
from medusa_heads.training.loss.teacher import Lessons, Teacher


@dataclass(frozen=True)
class OwnRows:
    """Where the target's own next token is supervised.

    Attributes:
        positions_N: indices of t into the flattened B * T positions.
        labels_N: token t + 1.
    """

    positions_N: Tensor
    labels_N: Tensor


def own_rows(labels_BT: Tensor, position_ids_BT: Tensor | None = None) -> OwnRows:
    """All positions whose next token is supervised and of the same document.

    `labels_BT` is unshifted, -100 where the text was not generated; of packed documents the
    `position_ids` each start at 0.
    """
    next_BT = torch.full_like(labels_BT, IGNORED)
    next_BT[:, :-1] = labels_BT[:, 1:]
    if position_ids_BT is not None:
        next_BT[:, :-1].masked_fill_(position_ids_BT[:, 1:] == 0, IGNORED)
    positions_N = (next_BT.flatten() != IGNORED).nonzero()[:, 0]
    return OwnRows(positions_N, next_BT.flatten()[positions_N])


def own_losses(
    head: Teacher,
    hidden_BTD: Tensor,
    rows: OwnRows,
    objective: LossConfig,
    before_BTD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The objective's loss at each row, without the logits of all rows at once.

    Args:
        head: the target's lm_head and what follows it.
        hidden_BTD: what the lm_head reads; gradients flow there.
        rows: positions and labels.
        objective: weights of cross-entropy and of KL(before || now).
        before_BTD: what it read before the adapter; for the KL.

    Returns:
        losses_N, and the log-probability of each label, log_true_N, without gradients.
    """
    features_ND = hidden_BTD.flatten(0, 1).index_select(0, rows.positions_N)
    device = features_ND.device.type
    compute = product_dtype(head.weight_WD)
    with torch.autocast(device, enabled=False):
        lessons = None
        if objective.needs_teacher:
            assert before_BTD is not None
            lessons = Lessons(head.reading(before_BTD), None, objective, compute)
        recipe = Recipe(objective, lessons, compute, torch.is_grad_enabled(), head.cap)
        bias_V = head.bias_W
        if head.scale != 1:
            features_ND = features_ND * head.scale
            bias_V = None if bias_V is None else bias_V * head.scale
        pairs = Pairs(rows.labels_N, rows.positions_N)
        return frozen_matrix_losses(features_ND, head.weight_WD, bias_V, pairs, recipe)
