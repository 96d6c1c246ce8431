"""Losses through a vocabulary matrix, without the logits of all rows at once.

The logits of a vocabulary of 128k tokens are the largest thing in training by far: K heads over a
few thousand rows would take tens of GB. Here they exist for one chunk of pairs at a time, and the
gradient is taken while they do, as in Liger Kernel (Hsu et al. 2024, arXiv:2410.10989). Products
want many pairs at a time; what is computed between them in fp32 is quickest on one thread over so
few that all of it stays in the processor's cache: strips.

Shapes: N pairs of a position and a head, C of a chunk, S of a strip, D hidden, V vocabulary, W rank
of a correction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.divergence import cross_entropy, measure_terms
from medusa_heads.training.loss.teacher import Lesson, Lessons

# Bytes of logits held at a time, and pairs that a product should have at least: below them the
# matrix is read from memory for too little work.
CHUNK_BYTES_CPU = 1 << 23
CHUNK_BYTES_GPU = 1 << 28
LEAST_CHUNK = 256
# Of a strip. Several threads have to be woken for every call, which costs more than their caches
# gain: on two, a step with strips of a thread's size took 1.45 times as long. A GPU's caches are
# too small for its many threads: there, too, only calls cost.
STRIP_ELEMENTS_THREAD = 1 << 18
STRIP_ELEMENTS_CPU = 1 << 21
STRIP_ELEMENTS_GPU = 1 << 26


def chunk_pairs(vocab_size: int, device: str, dtype: torch.dtype) -> int:
    """How many pairs' logits are held at a time."""
    budget = CHUNK_BYTES_CPU if device == "cpu" else CHUNK_BYTES_GPU
    return max(budget // (vocab_size * dtype.itemsize), LEAST_CHUNK)


def strips(rows: int, width: int, device: str) -> Iterator[slice]:
    """Rows of a wide matrix that fit a processor's cache, part after part."""
    if device != "cpu":
        budget = STRIP_ELEMENTS_GPU
    else:
        budget = STRIP_ELEMENTS_THREAD if torch.get_num_threads() == 1 else STRIP_ELEMENTS_CPU
    size = max(budget // width, 1)
    return (slice(start, start + size) for start in range(0, rows, size))


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
class Pairs:
    """N pairs of a position and a head: the true tokens in the heads' vocabulary, -100 where it has
    none, and where in the flattened batch the target predicts the same tokens."""

    labels_N: Tensor
    positions_N: Tensor


@dataclass(frozen=True)
class Recipe:
    """How losses are computed: which terms, the dtype of the products (softmax and sums run in
    fp32, fp64 for fp64), the target's distributions if a term needs them, a cap that logits x pass
    as `cap * tanh(x / cap)`, and memory shared by calls that follow each other."""

    objective: LossConfig
    compute: torch.dtype
    lessons: Lessons | None = None
    cap: float | None = None
    workspace: Workspace = field(default_factory=Workspace)

    @property
    def exact(self) -> torch.dtype:
        """dtype of softmax and sums."""
        return torch.promote_types(torch.float32, self.compute)


def matrix_losses(
    features_ND: Tensor,
    matrix_VD: Tensor,
    bias_V: Tensor | None,
    pairs: Pairs,
    recipe: Recipe,
    weights_N: Tensor | None = None,
    correction: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """losses_N, log_true_N (the log-probability of the label), and `sum(weights * losses)`.

    Of a `correction`, before_NW and after_VW, the product is added to the logits.

    Without weights, gradients flow from the losses to the features alone. With them, they flow from
    the sum, to matrix, bias and correction too, whose gradients can only be taken while the logits
    exist. Both once (no second derivatives). Where cross-entropy is the only term, pairs without a
    label must be given the weight 0.
    """
    learning = torch.is_grad_enabled()  # which autograd's functions do not know
    # Left on, autocast would cast the whole matrix anew for every chunk.
    with torch.autocast(features_ND.device.type, enabled=False):
        losses: tuple[Tensor, Tensor, Tensor] = _MatrixLosses.apply(
            features_ND,
            matrix_VD,
            bias_V,
            *(correction or (None, None)),
            pairs,
            recipe,
            weights_N,
            learning,
        )
    return losses


class _MatrixLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features_ND: Tensor,
        matrix_VD: Tensor,
        bias_V: Tensor | None,
        before_NW: Tensor | None,
        after_VW: Tensor | None,
        pairs: Pairs,
        recipe: Recipe,
        weights_N: Tensor | None,
        learning: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact, compute, lessons = recipe.exact, recipe.compute, recipe.lessons
        (count, _), width, device = features_ND.shape, len(matrix_VD), features_ND.device
        wanted = [need and learning for need in ctx.needs_input_grad[:5]]
        rounded_VD = matrix_VD.to(compute)
        rounded_VW = None if after_VW is None else after_VW.to(compute)
        losses_N = features_ND.new_empty(count, dtype=exact)
        log_true_N = torch.empty_like(losses_N)
        # As the products leave them: weights go on the D features, not on the V slopes.
        grad_ND = torch.empty_like(features_ND, dtype=compute) if wanted[0] else None
        grad_VD = torch.zeros_like(matrix_VD, dtype=exact) if wanted[1] else None
        grad_V = losses_N.new_zeros(width) if wanted[2] else None
        grad_NW = grad_VW = before_CW = None
        if before_NW is not None and after_VW is not None:
            grad_NW = torch.empty_like(before_NW, dtype=compute) if wanted[3] else None
            grad_VW = torch.zeros_like(after_VW, dtype=exact) if wanted[4] else None
        size = chunk_pairs(width, device.type, compute)
        if lessons is not None:  # the target's distributions stand beside the logits, exact
            size = chunk_pairs(max(width, lessons.width), device.type, exact)
        size = min(size, count)
        products_CV = recipe.workspace.matrix("products", size, width, compute, device)
        for start in range(0, count, max(size, 1)):
            chunk = slice(start, start + size)
            x_CD = features_ND[chunk].to(compute)
            z_CV = torch.mm(x_CD, rounded_VD.T, out=products_CV[: len(x_CD)])
            if before_NW is not None and rounded_VW is not None:
                before_CW = before_NW[chunk].to(compute)
                z_CV.addmm_(before_CW, rounded_VW.T)
            lesson = None if lessons is None else lessons.of(pairs.positions_N[chunk])
            labels_C, losses_C = pairs.labels_N[chunk], losses_N[chunk]
            for strip in strips(len(x_CD), width, device.type):
                part = None if lesson is None else lesson.part(strip)
                losses_C[strip], log_true_N[chunk][strip] = _measure_strip(
                    z_CV[strip], bias_V, labels_C[strip], part, recipe, any(wanted)
                )
            # The slopes have taken the place of the products.
            if grad_ND is not None:
                torch.mm(z_CV, rounded_VD, out=grad_ND[chunk])
            if grad_NW is not None and rounded_VW is not None:
                torch.mm(z_CV, rounded_VW, out=grad_NW[chunk])
            if weights_N is None:
                continue
            weights_C1 = weights_N[chunk, None]
            if grad_VD is not None:
                _add_product(grad_VD, z_CV, (x_CD * weights_C1).to(compute))
            if grad_VW is not None and before_CW is not None:
                _add_product(grad_VW, z_CV, (before_CW * weights_C1).to(compute))
            if grad_V is not None:
                grad_V += weights_N[chunk] @ z_CV.to(exact)
        # Those of the rows, which the weights still go on, and those of the whole.
        wholes = zip((grad_VD, grad_V, grad_VW), (matrix_VD, bias_V, after_VW), strict=True)
        ctx.save_for_backward(
            grad_ND,
            grad_NW,
            *(None if g is None or of is None else g.to(of.dtype) for g, of in wholes),
            weights_N,
        )
        ctx.dtypes = [features_ND.dtype, None if before_NW is None else before_NW.dtype]
        total = losses_N.new_zeros(()) if weights_N is None else losses_N @ weights_N
        ctx.mark_non_differentiable(log_true_N, total if weights_N is None else losses_N)
        return losses_N, log_true_N, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        *of_rows, grad_VD, grad_V, grad_VW, weights_N = ctx.saved_tensors
        grad_N = grad_N if weights_N is None else weights_N * grad
        rows = [
            None if of is None else _scaled(of.to(dtype), grad_N)
            for of, dtype in zip(of_rows, ctx.dtypes, strict=True)
        ]
        wholes = [
            None if of is None else of * grad.to(of.dtype) for of in (grad_VD, grad_V, grad_VW)
        ]
        return (rows[0], *wholes[:2], rows[1], wholes[2], None, None, None, None)


def _add_product(sum_VX: Tensor, z_CV: Tensor, x_CX: Tensor) -> None:
    if sum_VX.dtype == z_CV.dtype:
        sum_VX.addmm_(z_CV.T, x_CX)
    else:
        sum_VX += z_CV.T @ x_CX


def _scaled(grad_NX: Tensor, by_N: Tensor) -> Tensor:
    """In strips, because bf16 times fp32 goes through copies of both in fp32."""
    for strip in strips(len(grad_NX), grad_NX.shape[1], grad_NX.device.type):
        grad_NX[strip].mul_(by_N[strip, None])
    return grad_NX


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
        losses_S, log_true_S, slope_SV = measure_terms(
            objective, z_SV, labels_S, lesson, slope=slope, log_q_CV=scratch("log_q")
        )
    if slope_SV is not None:
        if steepness_SV is not None:
            slope_SV.mul_(steepness_SV)
        products_SV.copy_(slope_SV)
    return losses_S, log_true_S
