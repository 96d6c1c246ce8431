"""The target's own distribution of the tokens that heads learn to predict.

Shapes: B batch, T tokens, P positions of a batch (B * T), C pairs of a chunk, U different positions
among them, D hidden, X columns of hidden states with features, V vocabulary of the heads, W
vocabulary of the target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.heads.vocabulary import logit_scale, vocabulary
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig

# Under these names configurations say what caps the logits (Gemma).
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True)
class Teacher:
    """The target's lm_head, what follows it (logits are `cap * tanh(x / cap)` of `x = scale *
    (weight h + bias)`, without cap `x` itself), and what the lm_head would read at each position of
    a batch, row after row."""

    weight_WD: Tensor
    bias_W: Tensor | None
    scale: float = 1.0
    cap: float | None = None
    hidden_PD: Tensor | None = None

    @classmethod
    def from_target(cls, target: TargetModel) -> Teacher:
        """Read the lm_head and what follows it off the target, and check both by a short forward.
        Raises ValueError: the target makes its logits in another way."""
        scale, cap = logit_scale(target.config), None
        for name in _CAPS:
            cap = float(getattr(target.config, name, None) or 0) or cap
        teacher = cls(*vocabulary(target), scale, cap)
        teacher._check(target)
        return teacher

    @torch.no_grad()
    def _check(self, target: TargetModel) -> None:
        ids_1T = torch.arange(min(8, self.weight_WD.shape[0]), device=target.device)[None]
        with target.capture_hidden() as last_hidden:
            expected_TW = target.model(input_ids=ids_1T, use_cache=False).logits[0].float()
            hidden_TD = self.read_of(last_hidden()[0])
        got_TW = self.shaped(F.linear(hidden_TD.to(self.weight_WD.dtype), self.weight_WD).float())
        error = (got_TW - expected_TW).abs().max()
        # Room for a product that sums in another order, in the precision of the weights.
        tolerance = 8 * torch.finfo(self.weight_WD.dtype).eps * expected_TW.abs().max().clamp_min(1)
        if not error <= tolerance:
            raise ValueError(
                f"{type(target.model).__name__} makes its logits in a way that is not known here "
                f"(they differ from its lm_head's by {float(error):.3g}): train with cross_entropy "
                "alone, which does not need them"
            )

    def reading(self, hidden_BTX: Tensor) -> Teacher:
        """The same teacher with the hidden states of a batch, with features or without."""
        return replace(self, hidden_PD=self.read_of(hidden_BTX).flatten(0, -2))

    def read_of(self, hidden_RX: Tensor) -> Tensor:
        """Of hidden states with features, what the lm_head reads: (..., X) -> (..., D)."""
        return hidden_RX[..., -self.weight_WD.shape[1] :]

    def shaped(self, logits_UW: Tensor) -> Tensor:
        """Bias, scale and cap on fp32 products of hidden states and the lm_head, in place."""
        if self.bias_W is not None:
            logits_UW += self.bias_W.to(logits_UW.dtype)
        if self.scale != 1:
            logits_UW *= self.scale
        if self.cap is not None:
            logits_UW.div_(self.cap).tanh_().mul_(self.cap)
        return logits_UW


@dataclass(frozen=True)
class Lesson:
    """What the target predicts for the tokens of a chunk of pairs, each position once: pairs that
    predict the same token share a row, so that K heads cost one product, not K. `rows_C` is the row
    of each pair.

    `p_UV` is over the heads' vocabulary, summing to one there; `share_UV` as the target gives it:
    with a reduced vocabulary the rest to one is what no draft can reach. `certainty_U` is sum p log
    p.
    """

    log_p_UV: Tensor
    p_UV: Tensor
    share_UV: Tensor
    certainty_U: Tensor
    rows_C: Tensor

    def part(self, pairs: slice) -> Lesson:
        return replace(self, rows_C=self.rows_C[pairs])


class Lessons:
    """Hands out the `Lesson` of any pairs of a batch that the teacher reads, at the objective's
    temperature, over `draft_tokens` where heads have a reduced vocabulary, with products in
    `compute`."""

    def __init__(
        self,
        teacher: Teacher,
        draft_tokens: Tensor | None,
        objective: LossConfig,
        compute: torch.dtype,
    ) -> None:
        self.temperature = objective.temperature
        self.columns_V: Tensor | None = None
        if draft_tokens is not None:
            draft_tokens = draft_tokens.to(teacher.weight_WD.device)
            if objective.needs_overlap:
                self.columns_V = draft_tokens
            else:
                bias_V = None if teacher.bias_W is None else teacher.bias_W[draft_tokens]
                matrix_VD = teacher.weight_WD[draft_tokens]
                teacher = replace(teacher, weight_WD=matrix_VD, bias_W=bias_V)
        self.teacher = teacher
        self.matrix_WD = teacher.weight_WD.to(compute)
        self.width = len(self.matrix_WD)  # logits of a position

    def of(self, positions_C: Tensor) -> Lesson:
        """For pairs whose token the target predicts at these positions of the batch."""
        hidden_PD = self.teacher.hidden_PD
        assert hidden_PD is not None, "teacher.reading(hidden) comes first"
        # Pairs that are not supervised may point beyond the text; nothing is made of theirs.
        positions_C = positions_C.clamp(max=len(hidden_PD) - 1)
        positions_U, rows_C = positions_C.unique(return_inverse=True)
        exact = torch.promote_types(torch.float32, self.matrix_WD.dtype)
        hidden_UD = hidden_PD[positions_U].to(self.matrix_WD.dtype)
        logits_UW = self.teacher.shaped((hidden_UD @ self.matrix_WD.T).to(exact))
        if self.temperature != 1:
            logits_UW /= self.temperature
        log_p_UV = logits_UW.log_softmax(dim=-1)
        if self.columns_V is None:
            share_UV = p_UV = log_p_UV.exp()
        else:
            log_share_UV = log_p_UV[:, self.columns_V]
            log_p_UV = log_share_UV.log_softmax(dim=-1)
            share_UV, p_UV = log_share_UV.exp(), log_p_UV.exp()
        return Lesson(log_p_UV, p_UV, share_UV, torch.linalg.vecdot(p_UV, log_p_UV), rows_C)
