"""What heads learn, without K logit tensors and without K times the rows in memory.

Shapes: R rows, K heads, N = R * K pairs, D hidden, V vocabulary of the heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.heads import DraftHeads, product_dtype
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.fused import Pairs, Recipe, Workspace, matrix_losses
from medusa_heads.training.loss.rows import SupervisedRows, per_item
from medusa_heads.training.loss.teacher import Lessons, Teacher


def heads_loss(
    heads: DraftHeads,
    features_RKD: Tensor,
    rows: SupervisedRows,
    *,
    objective: LossConfig | None = None,
    num_items: Tensor | int,
    teacher: Teacher | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """`sum over rows and heads of weight * loss / num_items`, as `objective` says.

    With a reduced vocabulary, a true token outside it has no cross-entropy; forward and reverse KL
    compare with the target's distribution over the tokens that can be drafted, brought to sum 1;
    total variation and acceptance with its probabilities as they are, so that what cannot be
    drafted counts as lost.

    Args:
        heads: whose vocabulary matrices are used, and trained where they are the heads' own.
        features_RKD: what the heads made of the rows.
        rows: their labels and positions.
        objective: the terms and weights; default: cross-entropy with weights 0.8 ** i.
        num_items: the divisor, counted over ALL micro-batches of an optimiser step.
        teacher: the target, reading this batch; needed by all terms but cross-entropy.
        workspace: memory for the logits, where several calls follow each other.

    Returns:
        A scalar in fp32 (fp64 for fp64); 0 with zero gradients where nothing is supervised.

    Raises:
        ValueError: a term needs the teacher, and none is given.
    """
    objective = objective or LossConfig()
    labels_RK = heads.draft_ids(rows.labels_RK)
    matrix_VD, bias_V = heads.vocab_matrix(0)
    recipe = Recipe(objective, product_dtype(matrix_VD), workspace=workspace or Workspace())
    if objective.needs_teacher:
        if teacher is None:
            raise ValueError(
                f"the loss terms {sorted(objective.terms)} need the target's own distribution: "
                "pass teacher=Teacher.from_target(target).reading(hidden)"
            )
        lessons = Lessons(teacher, heads.draft_tokens, objective, recipe.compute)
        recipe = replace(recipe, lessons=lessons)
        supervised_RK = rows.labels_RK != IGNORED
    else:
        supervised_RK = labels_RK != IGNORED  # tokens that cannot be drafted teach nothing here
    offsets_K = 1 + torch.arange(labels_RK.shape[1], device=labels_RK.device)
    positions_RK = rows.positions_R[:, None] + offsets_K
    if heads.config.vocab_matrix == "shared":
        # One matrix: the rows of all heads go through it together.
        pairs = Pairs(labels_RK.flatten(), positions_RK.flatten())
        features_ND = features_RKD.flatten(0, 1)
        losses_N, log_true_N, _ = matrix_losses(features_ND, matrix_VD, bias_V, pairs, recipe)
        weights_RK = _weights(objective, log_true_N.view_as(labels_RK), supervised_RK)
        return per_item((losses_N * weights_RK.flatten()).sum(), num_items)
    # Head after head over all rows: each matrix and its gradient are large, and read once a chunk.
    of_heads = [
        (x_RD, *heads.vocab_matrix(i), Pairs(labels_RK[:, i], positions_RK[:, i]))
        for i, x_RD in enumerate(features_RKD.unbind(dim=1))
    ]
    log_true_RK = features_RKD.new_empty(labels_RK.shape, dtype=recipe.exact)
    if objective.head_weights == "acceptance":
        # A pair's weight hangs on all heads, so it takes a pass of its own to know them first.
        plain = replace(recipe, objective=LossConfig(), lessons=None)
        with torch.no_grad():
            for i, of_head in enumerate(of_heads):
                log_true_RK[:, i] = matrix_losses(*of_head, plain)[1]
    weights_RK = _weights(objective, log_true_RK, supervised_RK)
    parts = [
        matrix_losses(*of_head, recipe, weights_RK[:, i])[2] for i, of_head in enumerate(of_heads)
    ]
    return per_item(torch.stack(parts).sum(), num_items)


def _weights(objective: LossConfig, log_true_RK: Tensor, supervised_RK: Tensor) -> Tensor:
    """How much each pair of a position and a head counts."""
    if objective.head_weights == "decay":
        return decay_weights(supervised_RK, objective.decay, log_true_RK.dtype)
    return acceptance_weights(log_true_RK, supervised_RK, objective.smoothing)


def decay_weights(
    supervised_RK: Tensor, decay: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`decay ** i` for head i (Cai et al. 2024, arXiv:2401.10774, section 2.2.1)."""
    heads_K = torch.arange(supervised_RK.shape[1], device=supervised_RK.device, dtype=dtype)
    return torch.pow(decay, heads_K) * supervised_RK


def acceptance_weights(log_true_RK: Tensor, supervised_RK: Tensor, smoothing: float) -> Tensor:
    """D-PACE (Wu et al. 2026, arXiv:2605.18810, equations 7 and 8).

    With c_i the probability that head i gives the true token, smoothed to (1 - smoothing) c_i +
    smoothing, a draft is accepted up to about S = sum_m prod_{i <= m} c_i tokens. A pair counts as
    much as S hangs on it, w_j = dS / d log c_j = sum_{m >= j} prod_{i <= m} c_i, a number without
    gradient: early heads, on which the later ones hang, count most, and the later ones count more
    as the earlier ones get better. As in the paper the weights, between 0 and K, are not brought to
    a fixed sum: how large they are is part of the rule.

    Args:
        log_true_RK: log q of the true token; -inf where the head cannot draft it.
        supervised_RK: pairs that count; the others neither stop a draft nor add to its length.
        smoothing: the paper's alpha, 0.5 there.
    """
    confidence_RK = (1 - smoothing) * log_true_RK.detach().exp() + smoothing
    reached_RK = confidence_RK.where(supervised_RK, 1).cumprod(dim=1) * supervised_RK
    return reached_RK.flip(1).cumsum(dim=1).flip(1) * supervised_RK
