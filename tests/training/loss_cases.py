"""Tiny heads, rows and teachers for the tests of the loss, and the loss as its definition reads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.config import IGNORED, HeadsConfig
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.rows import SupervisedRows
from medusa_heads.training.loss.teacher import Teacher

D, W = 6, 11  # hidden size and the target's vocabulary
DRAFT_TOKENS = torch.tensor([0, 2, 3, 7, 10])


class LmHead:
    """Stands where a target would: what heads read of one is its lm_head and its embeddings."""

    def __init__(self, weight_VD: Tensor, bias_V: Tensor | None = None) -> None:
        self.linear = torch.nn.Linear(weight_VD.shape[1], weight_VD.shape[0], bias_V is not None)
        self.linear.weight = torch.nn.Parameter(weight_VD)
        if bias_V is not None:
            self.linear.bias = torch.nn.Parameter(bias_V)
        self.embeddings = torch.nn.Embedding.from_pretrained(weight_VD.float())

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.linear

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embeddings


def random_heads(
    num_heads: int,
    vocab_matrix: str = "shared",
    *,
    kind: str = "medusa",
    vocab: int = W,
    hidden: int = D,
    bias: bool = False,
    draft_tokens: Tensor | None = None,
    correction_rank: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> DraftHeads:
    """Heads whose every weight matters, on a random lm_head."""
    generator = torch.Generator().manual_seed(num_heads)
    lm_head = LmHead(
        torch.randn(vocab, hidden, generator=generator).to(dtype),
        torch.randn(vocab, generator=generator).to(dtype) if bias else None,
    )
    settings: dict[str, Any] = {"kind": kind, "vocab_matrix": vocab_matrix}
    settings["correction_rank"] = correction_rank
    if draft_tokens is not None:
        settings["draft_vocab_size"] = len(draft_tokens)
    with torch.random.fork_rng():
        torch.manual_seed(num_heads)  # fresh corrections are drawn
        heads = new_heads(lm_head, HeadsConfig(num_heads=num_heads, **settings), draft_tokens)
    heads.to(dtype)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return heads


def random_rows(rows: int, num_heads: int, *, vocab: int = W, gap: int = 1) -> SupervisedRows:
    """Rows at every `gap`-th position; a fourth of the last head's labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    labels_RK = torch.randint(0, vocab, (rows, num_heads), generator=generator)
    labels_RK[::4, -1] = IGNORED
    tokens_RK = torch.randint(0, vocab, (rows, num_heads), generator=generator)
    return SupervisedRows(gap * torch.arange(rows), labels_RK, tokens_RK)


def random_hidden(rows: int, hidden: int = D, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(2)).to(dtype)


def random_teacher(
    rows: SupervisedRows, *, vocab: int = W, hidden: int = D, dtype: torch.dtype = torch.float64
) -> Teacher:
    """With a bias, a scale and a cap, over exactly the positions of the rows."""
    generator = torch.Generator().manual_seed(3)
    weight_WD = torch.randn(vocab, hidden, generator=generator)
    bias_W = torch.randn(vocab, generator=generator)
    hidden_PD = torch.randn(int(rows.positions_R.max()) + 1, hidden, generator=generator)
    return Teacher(weight_WD.to(dtype), bias_W.to(dtype), 0.7, 5.0, hidden_PD.to(dtype))


def plain_loss(
    heads: DraftHeads,
    features_RKD: Tensor,
    rows: SupervisedRows,
    objective: LossConfig,
    num_items: int,
    teacher: Teacher | None = None,
) -> Tensor:
    """Pair by pair, from whole logits, with nothing shared and nothing in place."""
    rows_of_labels = rows.labels_RK.tolist()
    total = features_RKD.new_zeros(())
    for r, labels in enumerate(rows_of_labels):
        losses, confidences = {}, {}
        for i, label in enumerate(labels):
            if label == IGNORED:
                continue
            weight_VD, bias_V = heads.vocab_matrix(i)
            z_V = F.linear(features_RKD[r, i], weight_VD, bias_V)
            if heads.correction is not None:
                before_W = heads.correction.before.weight[rows.tokens_RK[r, i]]
                z_V = z_V + heads.correction.after.weight @ before_W
            losses[i] = z_V.new_zeros(())
            tokens = range(W) if heads.draft_tokens is None else heads.draft_tokens.tolist()
            confidences[i] = 0.0
            if label in tokens:
                log_true = z_V.log_softmax(0)[list(tokens).index(label)]
                losses[i] = -log_true * objective.weight("cross_entropy")
                confidences[i] = float(log_true.detach().exp())
            elif not objective.needs_teacher:
                del confidences[i], losses[i]
            if teacher is not None:
                position = min(int(rows.positions_R[r]) + 1 + i, len(teacher.hidden_PD) - 1)  # type: ignore[arg-type]
                losses[i] += plain_terms(z_V, list(tokens), teacher, position, objective)
        for j, loss in losses.items():
            if objective.head_weights == "decay":
                weight = objective.decay**j
            else:
                a = objective.smoothing
                weight, reached = 0.0, 1.0
                for m in sorted(confidences):
                    reached *= (1 - a) * confidences[m] + a
                    weight += reached if m >= j else 0
            total = total + weight * loss
    return total / num_items


def plain_terms(
    z_V: Tensor, tokens: list[int], teacher: Teacher, position: int, objective: LossConfig
) -> Tensor:
    """The terms with the target's own distribution, of one pair."""
    assert teacher.hidden_PD is not None and teacher.cap is not None
    x_W = F.linear(teacher.hidden_PD[position], teacher.weight_WD, teacher.bias_W) * teacher.scale
    target_W = teacher.cap * torch.tanh(x_W / teacher.cap)
    p_W = (target_W / objective.temperature).softmax(0)
    q_V = (z_V / objective.temperature).softmax(0)
    q_W = torch.zeros_like(p_W).index_put((torch.tensor(tokens),), q_V)
    p_V = p_W[tokens] / p_W[tokens].sum()
    m_V = (p_V + q_V) / 2
    terms = {
        "jensen_shannon": ((p_V * (p_V / m_V).log()).sum() + (q_V * (q_V / m_V).log()).sum()) / 2,
        "forward_kl": (p_V * (p_V / q_V).log()).sum(),
        "reverse_kl": (q_V * (q_V / p_V).log()).sum(),
        "total_variation": (p_W - q_W).abs().sum() / 2,
        "acceptance": -torch.minimum(p_W, q_W).sum().log(),
    }
    return torch.stack([objective.weight(name) * value for name, value in terms.items()]).sum()
