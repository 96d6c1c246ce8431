"""Losses through a vocabulary matrix, without the logits of all rows at once.

The logits of a vocabulary of 128k tokens are the largest thing in training by far: K heads over a
few thousand rows would take tens of GB. Here they exist for one chunk of pairs at a time, and the
gradient is taken while they do, as in Liger Kernel (Hsu et al. 2024, arXiv:2410.10989).

Shapes: N pairs of a position and a head, C of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from medusa_heads.training.divergence import measure_terms
from medusa_heads.training.loss_config import LossConfig
from medusa_heads.training.teacher import Lessons

# Logits held at a time, and pairs that a product should have at least: below them the matrix is
# read from memory for too little work.
CHUNK_LOGITS_CPU = 1 << 21
CHUNK_LOGITS_GPU = 1 << 26
LEAST_CHUNK = 256


@dataclass(frozen=True)
class Pairs:
    """What is known of N pairs of a position and a head.

    Attributes:
        labels_N: the true token in the heads' vocabulary, -100 where it has none.
        positions_N: where in the batch the target predicts the same token.
    """

    labels_N: Tensor
    positions_N: Tensor


class Workspace:
    """Memory that chunk after chunk is written to. Taken anew for each, on a CPU it would cost more
    time than what is computed in it: every page is fetched from the system and cleared."""

    def __init__(self) -> None:
        self._taken: dict[str, Tensor] = {}

    def matrix(
        self, name: str, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Uninitialised, [rows, width]; the next matrix of the same name lies in the same place."""
        taken, size = self._taken.get(name), rows * width
        if taken is None or len(taken) < size or (taken.dtype, taken.device) != (dtype, device):
            taken = self._taken[name] = torch.empty(size, dtype=dtype, device=device)
        return taken[:size].view(rows, width)


@dataclass(frozen=True)
class Recipe:
    """How the losses are computed.

    Attributes:
        objective: which terms.
        lessons: the target's distributions, if a term needs them.
        compute: dtype of the products; softmax and sums run in fp32 (fp64 for fp64).
        chunk: pairs at a time.
        learning: whether gradients are wanted. Under no_grad autograd still says that they are.
        cap: logits x become `cap * tanh(x / cap)`, as some targets' own do; None: they stay.
        workspace: shared by calls that follow each other.
    """

    objective: LossConfig
    lessons: Lessons | None
    compute: torch.dtype
    chunk: int
    learning: bool
    cap: float | None = None
    workspace: Workspace = field(default_factory=Workspace)

    @property
    def exact(self) -> torch.dtype:
        """dtype of softmax and sums."""
        return torch.promote_types(torch.float32, self.compute)


def chunk_pairs(vocab_size: int, device: str) -> int:
    """How many pairs' logits are held at a time."""
    budget = CHUNK_LOGITS_CPU if device == "cpu" else CHUNK_LOGITS_GPU
    return max(budget // vocab_size, LEAST_CHUNK)


def frozen_matrix_losses(
    features_ND: Tensor, matrix_VD: Tensor, bias_V: Tensor | None, pairs: Pairs, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """losses_N and log_true_N (the log-probability of the label) through a matrix that is not
    trained. Gradients flow from the losses to the features, once (no second derivatives).

    Where cross-entropy is the only term, pairs without a label must be given the weight 0.
    """
    losses: tuple[Tensor, Tensor] = _FrozenMatrix.apply(
        features_ND, matrix_VD, bias_V, pairs, recipe
    )
    return losses


def trained_matrix_loss(
    features_ND: Tensor,
    matrix_VD: Tensor,
    bias_V: Tensor | None,
    pairs: Pairs,
    weights_N: Tensor,
    recipe: Recipe,
) -> Tensor:
    """`sum(weights * losses)` through a matrix that is trained: gradients flow to features, matrix
    and bias, once. The matrix's can only be summed while the logits exist, hence the weights."""
    loss: Tensor = _TrainedMatrix.apply(features_ND, matrix_VD, bias_V, pairs, weights_N, recipe)
    return loss


def _chunks(
    features_ND: Tensor,
    matrix_VD: Tensor,
    bias_V: Tensor | None,
    pairs: Pairs,
    recipe: Recipe,
    slope: bool,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor | None]]:
    """Of each chunk: where it lies, features_CD, losses_C, log_true_C and slope_CV, the matrix
    products' factors in `compute`. What is yielded is overwritten by the next chunk."""
    size = min(recipe.chunk, len(features_ND))
    shape, device = (size, matrix_VD.shape[0]), features_ND.device
    space = recipe.workspace
    logits_CV = space.matrix("logits", *shape, recipe.exact, device)
    rounded_CV = logits_CV
    if recipe.compute != recipe.exact:
        rounded_CV = space.matrix("rounded", *shape, recipe.compute, device)
    log_q_CV = space.matrix("log_q", *shape, recipe.exact, device)
    for start in range(0, len(features_ND), max(size, 1)):
        chunk = slice(start, start + size)
        x_CD = features_ND[chunk].to(recipe.compute)
        z_CV, low_CV = logits_CV[: len(x_CD)], rounded_CV[: len(x_CD)]
        torch.mm(x_CD, matrix_VD.T, out=low_CV)
        if low_CV.dtype != z_CV.dtype:
            z_CV.copy_(low_CV)
        if bias_V is not None:
            z_CV += bias_V.to(z_CV.dtype)
        steepness_CV = None
        if recipe.cap is not None:
            z_CV.div_(recipe.cap).tanh_()
            steepness_CV = 1 - z_CV.square()
            z_CV.mul_(recipe.cap)
        lesson = None
        if recipe.lessons is not None:
            lesson = recipe.lessons.of(pairs.positions_N[chunk])
        losses_C, log_true_C, slope_CV = measure_terms(
            recipe.objective,
            z_CV,
            pairs.labels_N[chunk],
            lesson,
            slope=slope,
            log_q_CV=log_q_CV[: len(x_CD)],
        )
        if slope_CV is not None and steepness_CV is not None:
            slope_CV.mul_(steepness_CV)
        if slope_CV is not None and slope_CV.dtype != recipe.compute:
            slope_CV = low_CV.copy_(slope_CV)
        yield chunk, x_CD, losses_C, log_true_C, slope_CV


class _FrozenMatrix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features_ND: Tensor,
        matrix_VD: Tensor,
        bias_V: Tensor | None,
        pairs: Pairs,
        recipe: Recipe,
    ) -> tuple[Tensor, Tensor]:
        wanted = recipe.learning and ctx.needs_input_grad[0]
        losses_N = features_ND.new_empty(len(features_ND), dtype=recipe.exact)
        log_true_N = torch.empty_like(losses_N)
        grad_ND = torch.empty_like(features_ND) if wanted else None
        matrix_VD = matrix_VD.to(recipe.compute)
        for chunk, _, losses_C, log_true_C, slope_CV in _chunks(
            features_ND, matrix_VD, bias_V, pairs, recipe, wanted
        ):
            losses_N[chunk] = losses_C
            log_true_N[chunk] = log_true_C
            if grad_ND is not None:
                assert slope_CV is not None
                grad_ND[chunk] = slope_CV @ matrix_VD
        ctx.save_for_backward(grad_ND)
        ctx.mark_non_differentiable(log_true_N)
        return losses_N, log_true_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad_ND,) = ctx.saved_tensors
        return grad_ND * grad_N[:, None].to(grad_ND.dtype), None, None, None, None


class _TrainedMatrix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features_ND: Tensor,
        matrix_VD: Tensor,
        bias_V: Tensor | None,
        pairs: Pairs,
        weights_N: Tensor,
        recipe: Recipe,
    ) -> Tensor:
        exact = recipe.exact
        wanted = (need and recipe.learning for need in ctx.needs_input_grad[:3])
        want_features, want_matrix, want_bias = wanted
        rounded_VD = matrix_VD.to(recipe.compute)
        total = torch.zeros((), dtype=exact, device=features_ND.device)
        grad_ND = torch.empty_like(features_ND) if want_features else None
        grad_VD = torch.zeros_like(matrix_VD, dtype=exact) if want_matrix else None
        grad_V = None
        if bias_V is not None and want_bias:
            grad_V = torch.zeros_like(bias_V, dtype=exact)
        slope = want_features or want_matrix or want_bias
        for chunk, x_CD, losses_C, _, slope_CV in _chunks(
            features_ND, rounded_VD, bias_V, pairs, recipe, slope
        ):
            weights_C = weights_N[chunk]
            total += losses_C @ weights_C
            if slope_CV is None:
                continue
            # The weights go on the D features, not on the V slopes.
            if grad_ND is not None:
                grad_ND[chunk] = (slope_CV @ rounded_VD).to(exact) * weights_C[:, None]
            weighted_CD = (x_CD * weights_C[:, None]).to(recipe.compute)
            if grad_VD is not None and recipe.compute == exact:
                grad_VD.addmm_(slope_CV.T, weighted_CD)
            elif grad_VD is not None:
                grad_VD += slope_CV.T @ weighted_CD
            if grad_V is not None:
                grad_V += weights_C @ slope_CV.to(exact)
        ctx.save_for_backward(
            grad_ND,
            None if grad_VD is None else grad_VD.to(matrix_VD.dtype),
            None if grad_V is None or bias_V is None else grad_V.to(bias_V.dtype),
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (
            None if saved is None else saved * grad.to(saved.dtype) for saved in ctx.saved_tensors
        )
        return (*grads, None, None, None)
