"""The terms of the loss for a chunk of logits, with their slopes.

Shapes: C pairs of a chunk, V vocabulary of the heads. A slope is d loss / d logits.

With q = softmax(z) and z the logits over the temperature, the slopes in z are
forward KL: q - p;  reverse KL: q (log q - log p - KL);  with m = (p + q) / 2,
Jensen-Shannon: q (log q - log m - KL(q || m)) / 2;  and with the overlap a = sum min(p, q), the
derivative of which is q (below - sum q below) where `below` is 1 for q < p and else 0:
total variation 1 - a: -da;  acceptance -log a: -da / a.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.teacher import Lesson

# No overlap at all has no logarithm; fp32 can round a tiny one to zero.
_LEAST_OVERLAP = 1e-30


def cross_entropy(
    logits_CV: Tensor, labels_C: Tensor, weight: float, *, slope: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `measure_terms` gives where this is the only term, in the logits' own memory. The slope
    of a pair without a true token is undefined: callers give such a pair the weight 0."""
    known_C = labels_C != IGNORED
    label_C1 = labels_C.where(known_C, 0)[:, None]
    logits_CV -= logits_CV.amax(dim=-1, keepdim=True)
    true_C1 = logits_CV.gather(1, label_C1)
    total_C1 = logits_CV.exp_().sum(dim=-1, keepdim=True)
    log_true_C = (true_C1 - total_C1.log())[:, 0].where(known_C, -torch.inf)
    losses_C = (-weight * log_true_C).where(known_C, 0)
    if not slope:
        return losses_C, log_true_C, None
    return losses_C, log_true_C, _excess(logits_CV.mul_(weight / total_C1), label_C1, weight)


def measure_terms(
    objective: LossConfig,
    logits_CV: Tensor,
    labels_C: Tensor,
    lesson: Lesson,
    *,
    slope: bool,
    log_q_CV: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """losses_C, log_true_C (log q of the label, -inf where there is none) and, if wanted, slope_CV
    of a chunk of fp32 logits, which are overwritten; so is `log_q_CV`, memory in which slopes may
    be returned. A pair without a true token, -100, has no cross-entropy."""
    known_C = labels_C != IGNORED
    label_C1 = labels_C.where(known_C, 0)[:, None]
    torch.log_softmax(logits_CV, dim=-1, out=log_q_CV)
    log_true_C = log_q_CV.gather(1, label_C1)[:, 0].where(known_C, -torch.inf)
    weight = objective.weight("cross_entropy")
    losses_C = (-weight * log_true_C).where(known_C, 0)
    slope_CV: Tensor | None = None
    if weight and slope:
        share_C = known_C.to(log_q_CV.dtype) * weight
        slope_CV = _excess(log_q_CV.exp(), label_C1, 1).mul_(share_C[:, None])
    if objective.temperature != 1:
        torch.log_softmax(logits_CV.div_(objective.temperature), dim=-1, out=log_q_CV)
    # The logits have served: their memory takes q.
    q_CV = torch.exp(log_q_CV, out=logits_CV)
    taught_C, taught_CV = _taught(log_q_CV, q_CV, lesson, objective, slope)
    losses_C += taught_C
    if taught_CV is not None:
        taught_CV /= objective.temperature
        slope_CV = taught_CV if slope_CV is None else slope_CV.add_(taught_CV)
    return losses_C, log_true_C, slope_CV


def _excess(q_CV: Tensor, label_C1: Tensor, one: float) -> Tensor:
    """Cross-entropy's slope, q - 1 at the label and q elsewhere, in place; all `one` times."""
    return q_CV.scatter_add_(1, label_C1, q_CV.new_full(label_C1.shape, -one))


def _taught(
    log_q_CV: Tensor, q_CV: Tensor, lesson: Lesson, objective: LossConfig, slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses and slopes, in the logits over the temperature, of all terms with a p."""
    losses_C, rows_C = q_CV.new_zeros(len(q_CV)), lesson.rows_C
    slopes: list[Tensor] = []

    def add(loss_C: Tensor, part_CV: Tensor, mean_C: Tensor, size: float | Tensor) -> None:
        """A loss; its slope is size q (part - mean), with the mean over q."""
        losses_C.add_(loss_C)
        if slope:
            part_CV = part_CV.sub_(mean_C[:, None]).mul_(q_CV).mul_(size)
            slopes[:] = [slopes[0].add_(part_CV) if slopes else part_CV]

    if weight := objective.weight("forward_kl"):
        p_CV = lesson.p_UV[rows_C]
        losses_C += weight * (lesson.certainty_U[rows_C] - torch.linalg.vecdot(p_CV, log_q_CV))
        if slope:
            slopes.append(torch.sub(q_CV, p_CV, out=p_CV).mul_(weight))
    if weight := objective.weight("jensen_shannon"):
        p_CV = lesson.p_UV[rows_C]
        # Where both have underflown to 0, nothing is left to weigh the logarithm with.
        log_m_CV = ((p_CV + q_CV) / 2).clamp_min_(torch.finfo(q_CV.dtype).tiny).log_()
        of_p_C = torch.linalg.vecdot(p_CV, lesson.log_p_UV[rows_C] - log_m_CV)
        surplus_CV = torch.sub(log_q_CV, log_m_CV, out=log_m_CV)
        of_q_C = torch.linalg.vecdot(q_CV, surplus_CV)
        add(weight / 2 * (of_p_C + of_q_C), surplus_CV, of_q_C, weight / 2)
    if weight := objective.weight("reverse_kl"):
        surplus_CV = torch.sub(log_q_CV, lesson.log_p_UV[rows_C], out=log_q_CV)
        divergence_C = torch.linalg.vecdot(q_CV, surplus_CV)
        add(weight * divergence_C, surplus_CV, divergence_C, weight)
    if objective.needs_overlap:
        p_CV = lesson.share_UV[rows_C]
        below_CV = (q_CV < p_CV).to(q_CV.dtype)
        overlap_C = torch.minimum(q_CV, p_CV, out=p_CV).sum(dim=-1).clamp_min(_LEAST_OVERLAP)
        of_variation, of_acceptance = map(objective.weight, ("total_variation", "acceptance"))
        loss_C = of_variation * (1 - overlap_C) - of_acceptance * overlap_C.log()
        size_C1 = -(of_variation + of_acceptance / overlap_C)[:, None]
        add(loss_C, below_CV, torch.linalg.vecdot(q_CV, below_CV), size_C1)
    return losses_C, slopes[0] if slopes else None
