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
from medusa_heads.training.loss.chunks import Workspace
from medusa_heads.training.loss.fused import (
    Pairs,
    Recipe,
    frozen_matrix_losses,
    trained_matrix_loss,
)
from medusa_heads.training.loss.head_weights import acceptance_weights, decay_weights
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
    supervised_RK = rows.labels_RK != IGNORED
    labels_RK = heads.draft_ids(rows.labels_RK)
    if objective.needs_teacher:
        if teacher is None:
            raise ValueError(
                f"the loss terms {sorted(objective.terms)} need the target's own distribution: "
                "pass teacher=Teacher.from_target(target).reading(hidden)"
            )
    else:
        teacher = None
        # Tokens that cannot be drafted teach nothing here.
        supervised_RK = labels_RK != IGNORED
    offsets_K = 1 + torch.arange(labels_RK.shape[1], device=labels_RK.device)
    positions_RK = rows.positions_R[:, None] + offsets_K
    matrix_VD, bias_V = heads.vocab_matrix(0)
    recipe = _recipe(heads, matrix_VD, objective, teacher, workspace or Workspace())
    # Left on, autocast would cast the whole matrix anew for every chunk.
    with torch.autocast(features_RKD.device.type, enabled=False):
        if heads.config.vocab_matrix == "shared":
            # One matrix: the rows of all heads go through it together.
            losses_N, log_true_N = frozen_matrix_losses(
                features_RKD.flatten(0, 1),
                matrix_VD,
                bias_V,
                Pairs(labels_RK.flatten(), positions_RK.flatten()),
                recipe,
            )
            weights_RK = _weights(objective, log_true_N.view_as(labels_RK), supervised_RK)
            total = losses_N @ weights_RK.flatten()
        else:
            total = _own_matrices_loss(
                heads, features_RKD, labels_RK, positions_RK, supervised_RK, recipe
            )
    return per_item(total, num_items)


def _own_matrices_loss(
    heads: DraftHeads,
    features_RKD: Tensor,
    labels_RK: Tensor,
    positions_RK: Tensor,
    supervised_RK: Tensor,
    recipe: Recipe,
) -> Tensor:
    # Head after head over all rows: each matrix and its gradient are large, and read once a chunk.
    features = features_RKD.unbind(dim=1)
    pairs = [Pairs(labels_RK[:, i], positions_RK[:, i]) for i in range(labels_RK.shape[1])]
    if recipe.objective.head_weights == "acceptance":
        # A pair's weight hangs on all heads, so it takes a pass of its own to know them first.
        plain = replace(recipe, objective=LossConfig(), lessons=None, learning=False)
        with torch.no_grad():
            log_true = [
                frozen_matrix_losses(x_RD, *heads.vocab_matrix(i), pairs[i], plain)[1]
                for i, x_RD in enumerate(features)
            ]
        log_true_RK = torch.stack(log_true, dim=1)
    else:
        log_true_RK = features_RKD.new_empty(labels_RK.shape, dtype=recipe.exact)
    weights_RK = _weights(recipe.objective, log_true_RK, supervised_RK)
    parts = [
        trained_matrix_loss(x_RD, *heads.vocab_matrix(i), pairs[i], weights_RK[:, i], recipe)
        for i, x_RD in enumerate(features)
    ]
    return torch.stack(parts).sum()


def _weights(objective: LossConfig, log_true_RK: Tensor, supervised_RK: Tensor) -> Tensor:
    if objective.head_weights == "decay":
        return decay_weights(supervised_RK, objective.decay, log_true_RK.dtype)
    return acceptance_weights(log_true_RK, supervised_RK, objective.smoothing)


def _recipe(
    heads: DraftHeads,
    matrix_VD: Tensor,
    objective: LossConfig,
    teacher: Teacher | None,
    workspace: Workspace,
) -> Recipe:
    compute = product_dtype(matrix_VD)
    lessons = None
    if teacher is not None:
        lessons = Lessons(teacher, heads.draft_tokens, objective, compute)
    return Recipe(objective, lessons, compute, torch.is_grad_enabled(), workspace=workspace)
