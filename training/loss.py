"""Cross-entropy of K heads without K logit tensors.

The logits of a vocabulary of 128k tokens are the largest thing in training by far: K heads over a
few thousand rows would take tens of GB. Here they exist for one chunk of rows at a time, and the
gradient is taken while they do, as in Liger Kernel (Hsu et al. 2024, arXiv:2410.10989).

Shapes: R rows, K heads, N rows of features (R or R * K), C rows of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from medusa_heads.config import IGNORED
from medusa_heads.heads import DraftHeads
from medusa_heads.training.rows import SupervisedRows

# Logits held at a time. On a CPU a chunk should stay near the caches, on a GPU it should fill it.
CHUNK_LOGITS_CPU = 1 << 20
CHUNK_LOGITS_GPU = 1 << 26


def heads_loss(
    heads: DraftHeads,
    features_RKD: Tensor,
    rows: SupervisedRows,
    *,
    decay: float = 0.8,
    num_items: Tensor | int,
) -> Tensor:
    """`sum_i decay**i * CE_i / num_items`, CE_i summed over the rows (Cai et al. 2024, equation 1).

    Args:
        heads: whose parameters get the gradients.
        features_RKD: what the heads made of the supervised rows.
        rows: their labels.
        decay: weight of head i + 1 relative to head i.
        num_items: the divisor, counted over ALL micro-batches of an optimiser step.

    Returns:
        A scalar in fp32; 0 with zero gradients where nothing is supervised.
    """
    labels_RK = heads.draft_ids(rows.labels_RK)
    num_heads = labels_RK.shape[1]
    exponents_K = torch.arange(num_heads, device=labels_RK.device, dtype=torch.float32)
    weights_RK = torch.pow(decay, exponents_K).expand(labels_RK.shape)
    if heads.config.vocab_matrix == "shared":
        # One matrix: the rows of all heads go through it together.
        weight_VD, bias_V = heads.vocab_matrix(0)
        total = linear_cross_entropy(
            features_RKD.flatten(0, 1),
            weight_VD,
            bias_V,
            labels_RK.flatten(),
            weights_RK.flatten(),
        )
    else:
        total = features_RKD.new_zeros((), dtype=torch.float32)
        for i in range(num_heads):
            weight_VD, bias_V = heads.vocab_matrix(i)
            total = total + linear_cross_entropy(
                features_RKD[:, i], weight_VD, bias_V, labels_RK[:, i], weights_RK[:, i]
            )
    # A batch without a supervised token gives 0 / 1, not NaN.
    return total / (num_items.clamp(min=1) if isinstance(num_items, Tensor) else max(num_items, 1))


def linear_cross_entropy(
    features_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    weights_N: Tensor,
    *,
    chunk_rows: int | None = None,
) -> Tensor:
    """`sum_n weights[n] * cross_entropy(features[n] @ weight.T + bias, labels[n])`, chunk by chunk.

    The matrix product runs in autocast's dtype where autocast is on, else in the weight's; softmax
    and sums run in fp32. Rows labelled -100 count nothing. Gradients flow to features, weight and
    bias, once (no second derivatives).

    Returns:
        A scalar, fp32 (fp64 for fp64 input).
    """
    device = features_ND.device.type
    autocast = torch.is_autocast_enabled(device)
    compute = torch.get_autocast_dtype(device) if autocast else weight_VD.dtype
    rows = chunk_rows or _chunk_rows(weight_VD)
    # Left on, autocast would cast the whole matrix anew for every chunk.
    with torch.autocast(device, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(
            features_ND,
            weight_VD,
            bias_V,
            labels_N,
            weights_N,
            compute,
            rows,
            torch.is_grad_enabled(),
        )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        weights_N: Tensor,
        compute: torch.dtype,
        chunk_rows: int,
        learning: bool,
    ) -> Tensor:
        exact = torch.promote_types(torch.float32, compute)
        # Under no_grad autograd still says that gradients are needed.
        wanted = (need and learning for need in ctx.needs_input_grad[:3])
        want_features, want_weight, want_bias = wanted
        matrix_VD = weight_VD.to(compute)
        grad_ND = torch.zeros_like(features_ND) if want_features else None
        grad_VD = torch.zeros_like(weight_VD, dtype=exact) if want_weight else None
        grad_V = None
        if bias_V is not None and want_bias:
            grad_V = torch.zeros_like(bias_V, dtype=exact)
        total = torch.zeros((), dtype=exact, device=features_ND.device)
        for start in range(0, len(labels_N), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            x_CD = features_ND[chunk].to(compute)
            known_C = labels_N[chunk] != IGNORED
            label_C = labels_N[chunk].where(known_C, 0)
            share_C = weights_N[chunk].to(exact) * known_C
            logits_CV = (x_CD @ matrix_VD.T).to(exact)
            if bias_V is not None:
                logits_CV += bias_V.to(exact)
            log_total_C = logits_CV.logsumexp(dim=-1)
            true_C = logits_CV.gather(1, label_C[:, None]).squeeze(1)
            total += ((log_total_C - true_C) * share_C).sum()
            if not (want_features or want_weight or want_bias):
                continue
            # d loss / d logits = (softmax - one_hot) * share, written over the logits.
            slope_CV = logits_CV.sub_(log_total_C[:, None]).exp_()
            slope_CV.scatter_add_(1, label_C[:, None], -torch.ones_like(true_C)[:, None])
            slope_CV *= share_C[:, None]
            if grad_V is not None:
                grad_V += slope_CV.sum(dim=0)
            slope_CV = slope_CV.to(compute)
            if grad_ND is not None:
                grad_ND[chunk] = (slope_CV @ matrix_VD).to(grad_ND.dtype)
            if grad_VD is not None:
                grad_VD += slope_CV.T @ x_CD
        ctx.save_for_backward(
            grad_ND,
            None if grad_VD is None else grad_VD.to(weight_VD.dtype),
            None if grad_V is None or bias_V is None else grad_V.to(bias_V.dtype),
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (
            None if saved is None else saved * grad.to(saved.dtype) for saved in ctx.saved_tensors
        )
        return (*grads, None, None, None, None, None)


@torch.no_grad()
def head_ranks(heads: DraftHeads, hidden_RD: Tensor, rows: SupervisedRows, max_rank: int) -> Tensor:
    """The rank each head gave the true token: 0 for its top-1, `max_rank` for all at or beyond.

    Equal logits, common in bf16, rank by token id; a token that the heads cannot draft ranks last.
    Chunked over rows like the loss.

    Returns:
        ranks_RK, int64, -100 where the rows' labels are.
    """
    labels_RK = rows.labels_RK
    drafted_RK = heads.draft_ids(labels_RK)
    ranks_RK = torch.full_like(labels_RK, IGNORED)
    size = _chunk_rows(heads.vocab_matrix(0)[0])
    for start in range(0, len(labels_RK), size):
        chunk = slice(start, start + size)
        features_CKD = heads.features(hidden_RD[chunk], rows.tokens_RK[chunk])
        for i in range(labels_RK.shape[1]):
            weight_VD, bias_V = heads.vocab_matrix(i)
            known_C = labels_RK[chunk, i] != IGNORED
            drafted_C1 = drafted_RK[chunk, i : i + 1]
            label_C1 = drafted_C1.clamp(min=0)
            logits_CV = F.linear(features_CKD[:, i].to(weight_VD.dtype), weight_VD, bias_V)
            true_C1 = logits_CV.gather(1, label_C1)
            tokens_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
            ahead_CV = (logits_CV > true_C1) | ((logits_CV == true_C1) & (tokens_V < label_C1))
            rank_C = ahead_CV.sum(dim=1).clamp(max=max_rank)
            rank_C = rank_C.where(drafted_C1[:, 0] != IGNORED, max_rank)
            ranks_RK[chunk, i] = rank_C.where(known_C, IGNORED)
    return ranks_RK


def _chunk_rows(weight_VD: Tensor) -> int:
    budget = CHUNK_LOGITS_CPU if weight_VD.device.type == "cpu" else CHUNK_LOGITS_GPU
    return max(budget // weight_VD.shape[0], 16)
