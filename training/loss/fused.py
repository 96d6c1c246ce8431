"""Losses through a vocabulary matrix, without the logits of all rows at once.

The logits of a vocabulary of 128k tokens are the largest thing in training by far: K heads over a
few thousand rows would take tens of GB. Here they exist for one chunk of pairs at a time, and the
gradient is taken while they do, as in Liger Kernel (Hsu et al. 2024, arXiv:2410.10989). Products
want many pairs at a time; what is computed between them in fp32 goes over a chunk in strips that a
processor's cache can hold.

Shapes: N pairs of a position and a head, C of a chunk, S of a strip, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.chunks import Workspace, chunk_pairs, strips
from medusa_heads.training.loss.divergence import cross_entropy, measure_terms
from medusa_heads.training.loss.teacher import Lesson, Lessons


@dataclass(frozen=True)
class Pairs:
    """What is known of N pairs of a position and a head.

    Attributes:
        labels_N: the true token in the heads' vocabulary, -100 where it has none.
        positions_N: where in the batch the target predicts the same token.
    """

    labels_N: Tensor
    positions_N: Tensor


@dataclass(frozen=True)
class Recipe:
    """How the losses are computed.

    Attributes:
        objective: which terms.
        lessons: the target's distributions, if a term needs them.
        compute: dtype of the products; softmax and sums run in fp32 (fp64 for fp64).
        learning: whether gradients are wanted. Under no_grad autograd still says that they are.
        cap: logits x become `cap * tanh(x / cap)`, as some targets' own do; None: they stay.
        workspace: shared by calls that follow each other.
    """

    objective: LossConfig
    lessons: Lessons | None
    compute: torch.dtype
    learning: bool
    cap: float | None = None
    workspace: Workspace = field(default_factory=Workspace)

    @property
    def exact(self) -> torch.dtype:
        """dtype of softmax and sums."""
        return torch.promote_types(torch.float32, self.compute)

    def chunk(self, vocab_size: int, device: str) -> int:
        """How many pairs at a time."""
        if self.lessons is None:
            return chunk_pairs(vocab_size, device, self.compute)
        # The target's distributions stand beside the chunk's logits, exact.
        return chunk_pairs(max(vocab_size, self.lessons.width), device, self.exact)


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
    device, width = features_ND.device, matrix_VD.shape[0]
    size = min(recipe.chunk(width, device.type), len(features_ND))
    products_CV = recipe.workspace.matrix("products", size, width, recipe.compute, device)
    for start in range(0, len(features_ND), max(size, 1)):
        chunk = slice(start, start + size)
        x_CD = features_ND[chunk].to(recipe.compute)
        z_CV = products_CV[: len(x_CD)]
        torch.mm(x_CD, matrix_VD.T, out=z_CV)
        lesson = None
        if recipe.lessons is not None:
            lesson = recipe.lessons.of(pairs.positions_N[chunk])
        losses_C = z_CV.new_empty(len(x_CD), dtype=recipe.exact)
        log_true_C = torch.empty_like(losses_C)
        for strip in strips(len(x_CD), width, device.type):
            losses_C[strip], log_true_C[strip] = _measure_strip(
                z_CV[strip],
                bias_V,
                pairs.labels_N[chunk][strip],
                None if lesson is None else lesson.part(strip),
                recipe,
                slope,
            )
        yield chunk, x_CD, losses_C, log_true_C, z_CV if slope else None


def _measure_strip(
    products_SV: Tensor,
    bias_V: Tensor | None,
    labels_S: Tensor,
    lesson: Lesson | None,
    recipe: Recipe,
    slope: bool,
) -> tuple[Tensor, Tensor]:
    """losses_S and log_true_S; if wanted, the slopes take the place of the products."""

    def scratch(name: str) -> Tensor:
        rows, width = products_SV.shape
        return recipe.workspace.matrix(name, rows, width, recipe.exact, products_SV.device)

    z_SV = products_SV
    if recipe.compute != recipe.exact:
        z_SV = scratch("logits").copy_(products_SV)
    if bias_V is not None:
        z_SV += bias_V.to(z_SV.dtype)
    steepness_SV = None
    if recipe.cap is not None:
        z_SV.div_(recipe.cap).tanh_()
        steepness_SV = 1 - z_SV.square()
        z_SV.mul_(recipe.cap)
    objective = recipe.objective
    if lesson is None:
        weight = objective.weight("cross_entropy")
        losses_S, log_true_S, slope_SV = cross_entropy(z_SV, labels_S, weight, slope=slope)
    else:
        log_q_SV = scratch("log_q")
        losses_S, log_true_S, slope_SV = measure_terms(
            objective, z_SV, labels_S, lesson, slope=slope, log_q_CV=log_q_SV
        )
    if slope_SV is not None:
        if steepness_SV is not None:
            slope_SV.mul_(steepness_SV)
        products_SV.copy_(slope_SV)
    return losses_S, log_true_S


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
        # As the products leave them; their weights are known in backward.
        grad_ND = torch.empty_like(features_ND, dtype=recipe.compute) if wanted else None
        matrix_VD = matrix_VD.to(recipe.compute)
        for chunk, _, losses_C, log_true_C, slope_CV in _chunks(
            features_ND, matrix_VD, bias_V, pairs, recipe, wanted
        ):
            losses_N[chunk] = losses_C
            log_true_N[chunk] = log_true_C
            if grad_ND is not None:
                assert slope_CV is not None
                torch.mm(slope_CV, matrix_VD, out=grad_ND[chunk])
        ctx.save_for_backward(grad_ND)
        ctx.dtype = features_ND.dtype
        ctx.mark_non_differentiable(log_true_N)
        return losses_N, log_true_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slopes_ND,) = ctx.saved_tensors
        grad_ND = slopes_ND.to(ctx.dtype)
        # In strips, because bf16 times fp32 goes through copies of both in fp32.
        for strip in strips(len(grad_ND), grad_ND.shape[1], grad_ND.device.type):
            grad_ND[strip].mul_(grad_N[strip, None])
        return grad_ND, None, None, None, None


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
