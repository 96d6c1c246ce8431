"""How much each pair of a position and a head counts in the loss.

Shapes: R rows, K heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    as the earlier ones get better.

    As in the paper the weights are not brought to a fixed sum: how large they are is part of the
    rule. They lie between 0 and K.

    Args:
        log_true_RK: log q of the true token; -inf where the head cannot draft it.
        supervised_RK: pairs that count; the others neither stop a draft nor add to its length.
        smoothing: the paper's alpha, 0.5 there.
    """
    confidence_RK = (1 - smoothing) * log_true_RK.detach().exp() + smoothing
    reached_RK = confidence_RK.where(supervised_RK, 1).cumprod(dim=1) * supervised_RK
    return reached_RK.flip(1).cumsum(dim=1).flip(1) * supervised_RK
