"""What a draft model learns: the target's distribution, through its own vocabulary matrix.

Shapes: B batch, T tokens, P positions of a batch (B * T), R supervised positions, C of a chunk,
D hidden of the draft, V vocabulary that both know.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.heads import product_dtype
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.chunks import chunk_pairs
from medusa_heads.training.loss.fused import Pairs, Recipe, trained_matrix_loss
from medusa_heads.training.loss.rows import per_item
from medusa_heads.training.loss.teacher import Lessons, Teacher

_OVERLAP = LossConfig({"total_variation": 1.0})  # at temperature 1, whatever is learnt at


class DraftLoss:
    """The loss of a draft model, and the figures it is judged by.

    Args:
        draft: the model that is trained.
        target: the frozen one, on the same device.
        objective: which terms, at which temperature.

    Raises:
        ValueError: logits of either are made in a way that is not known, or the draft's are capped.
    """

    def __init__(self, draft: TargetModel, target: TargetModel, objective: LossConfig) -> None:
        own = Teacher.from_target(draft)
        if own.cap is not None:
            raise ValueError(
                f"the draft model caps its logits at {own.cap}, which training does not follow: "
                "set the cap in its configuration to null"
            )
        self.objective = objective
        self._draft, self._scale = draft, own.scale
        self._teacher = Teacher.from_target(target)
        self._shared = min(draft.vocab_size, target.vocab_size)
        # Rows that only the target's matrix has are padding: no text holds their tokens.
        self._columns_V = None
        if target.vocab_size > self._shared:
            self._columns_V = torch.arange(self._shared, device=target.device)

    def __call__(
        self,
        features_RD: Tensor,
        labels_R: Tensor,
        positions_R: Tensor,
        hidden_BTD: Tensor,
        num_items: Tensor | int,
    ) -> Tensor:
        """The terms' sum over the positions, divided by `num_items`; a scalar in fp32.

        Args:
            features_RD: what the draft's lm_head would read.
            labels_R: the true next tokens, -100 where there is none to learn.
            positions_R: where in the batch the positions are.
            hidden_BTD: the target's hidden states.
            num_items: the divisor, counted over ALL micro-batches of an optimiser step.
        """
        matrix_VD, bias_V = self._matrix()
        compute = product_dtype(matrix_VD)
        lessons = self._lessons(hidden_BTD, self.objective, compute)
        recipe = Recipe(
            self.objective,
            lessons if self.objective.needs_teacher else None,
            compute,
            torch.is_grad_enabled(),
        )
        pairs = Pairs(labels_R.where(labels_R < self._shared, IGNORED), positions_R)
        known = pairs.labels_N != IGNORED
        weights_R = torch.ones_like(known, dtype=torch.float32)
        if not self.objective.needs_teacher:
            weights_R = known.float()
        with torch.autocast(features_RD.device.type, enabled=False):
            total = trained_matrix_loss(
                features_RD * self._scale, matrix_VD, bias_V, pairs, weights_R, recipe
            )
        return per_item(total, num_items)

    @torch.no_grad()
    def measure(
        self, features_RD: Tensor, next_R: Tensor, positions_R: Tensor, hidden_BTD: Tensor
    ) -> Tensor:
        """figures_R3 of `draft_metrics`, chunk by chunk; `next_R` are the text's next tokens."""
        matrix_VD, bias_V = self._matrix()
        lessons = self._lessons(hidden_BTD, _OVERLAP, matrix_VD.dtype)
        size = chunk_pairs(self._shared, features_RD.device.type, torch.float32)
        parts = []
        with torch.autocast(features_RD.device.type, enabled=False):
            for start in range(0, len(features_RD), size):
                chunk = slice(start, start + size)
                scaled_CD = features_RD[chunk].to(matrix_VD.dtype) * self._scale
                logits_CV = F.linear(scaled_CD, matrix_VD, bias_V).float()
                lesson = lessons.of(positions_R[chunk])
                p_CV = lesson.share_UV[lesson.rows_C]
                likeliest_C = logits_CV.argmax(dim=-1)
                overlap_C = torch.minimum(p_CV, logits_CV.softmax(dim=-1)).sum(dim=-1)
                agrees_C = likeliest_C == p_CV.argmax(dim=-1)
                hit_C = likeliest_C == next_R[chunk]
                parts.append(torch.stack([overlap_C, agrees_C.float(), hit_C.float()], dim=1))
        return torch.cat(parts) if parts else features_RD.new_zeros(0, 3, dtype=torch.float32)

    def _matrix(self) -> tuple[Tensor, Tensor | None]:
        lm_head = self._draft.get_output_embeddings()
        bias_V = getattr(lm_head, "bias", None)
        if bias_V is not None:
            bias_V = bias_V[: self._shared] * self._scale
        return lm_head.weight[: self._shared], bias_V

    def _lessons(self, hidden_BTD: Tensor, objective: LossConfig, compute: torch.dtype) -> Lessons:
        teacher = replace(self._teacher, hidden_PD=hidden_BTD.flatten(0, 1))
        return Lessons(teacher, self._columns_V, objective, compute)
