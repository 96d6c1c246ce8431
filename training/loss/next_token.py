"""Losses of a whole model's next tokens: of a draft model through its own vocabulary matrix, and of
a target that an adapter moves.

Shapes: B batch, T tokens, R or N supervised positions, C of a chunk, D hidden, V vocabulary that
both models know.
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
from medusa_heads.training.loss.fused import Pairs, Recipe, chunk_pairs, matrix_losses
from medusa_heads.training.loss.rows import per_item
from medusa_heads.training.loss.teacher import Lessons, Teacher

_OVERLAP = LossConfig({"total_variation": 1.0})  # at temperature 1, whatever is learnt at


def next_losses(
    head: Teacher,
    hidden_BTX: Tensor,
    rows: Pairs,
    objective: LossConfig,
    before_BTX: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """losses_N of a target at supervised rows, without the logits of all rows at once; and
    log_true_N, the log-probability of each label, without gradients. Those of the losses flow to
    what the lm_head reads of `hidden_BTX`; `before_BTX` is what was read before the adapter, for
    KL(before || now)."""
    features_ND = head.read_of(hidden_BTX).flatten(0, 1).index_select(0, rows.positions_N)
    compute = product_dtype(head.weight_WD)
    lessons = None
    if objective.needs_teacher:
        assert before_BTX is not None
        lessons = Lessons(head.reading(before_BTX), None, objective, compute)
    bias_V = head.bias_W
    if head.scale != 1:
        features_ND = features_ND * head.scale
        bias_V = None if bias_V is None else bias_V * head.scale
    recipe = Recipe(objective, compute, lessons, head.cap)
    return matrix_losses(features_ND, head.weight_WD, bias_V, rows, recipe)[:2]


class DraftLoss:
    """The loss of a draft model that learns a target's distribution, and the figures it is judged
    by; both models are on the same device. Raises ValueError: logits of either are made in a way
    that is not known, or the draft's are capped."""

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
        self, features_RD: Tensor, rows: Pairs, hidden_BTD: Tensor, num_items: Tensor | int
    ) -> Tensor:
        """The terms' sum over the rows (true next tokens, -100 where there is none to learn),
        divided by `num_items`, those of ALL micro-batches of an optimiser step; a scalar in fp32.
        `features_RD` is what the draft's lm_head would read."""
        matrix_VD, bias_V = self._matrix()
        compute = product_dtype(matrix_VD)
        known = replace(rows, labels_N=rows.labels_N.where(rows.labels_N < self._shared, IGNORED))
        lessons = None
        weights_R = torch.ones_like(rows.positions_N, dtype=torch.float32)
        if self.objective.needs_teacher:
            lessons = self._lessons(hidden_BTD, self.objective, compute)
        else:
            weights_R *= known.labels_N != IGNORED
        recipe = Recipe(self.objective, compute, lessons)
        scaled_RD = features_RD * self._scale
        losses = matrix_losses(scaled_RD, matrix_VD, bias_V, known, recipe, weights_R)
        return per_item(losses[2], num_items)

    @torch.no_grad()
    def measure(self, features_RD: Tensor, rows: Pairs, hidden_BTD: Tensor) -> Tensor:
        """figures_R3 of `draft_metrics`, chunk by chunk."""
        matrix_VD, bias_V = self._matrix()
        lessons = self._lessons(hidden_BTD, _OVERLAP, matrix_VD.dtype)
        size = chunk_pairs(self._shared, features_RD.device.type, torch.float32)
        figures_R3 = features_RD.new_empty(len(features_RD), 3, dtype=torch.float32)
        with torch.autocast(features_RD.device.type, enabled=False):
            for start in range(0, len(features_RD), size):
                chunk = slice(start, start + size)
                scaled_CD = features_RD[chunk].to(matrix_VD.dtype) * self._scale
                logits_CV = F.linear(scaled_CD, matrix_VD, bias_V).float()
                lesson = lessons.of(rows.positions_N[chunk])
                p_CV = lesson.share_UV[lesson.rows_C]
                likeliest_C = logits_CV.argmax(dim=-1)
                overlap_C = torch.minimum(p_CV, logits_CV.softmax(dim=-1)).sum(dim=-1)
                agrees_C = likeliest_C == p_CV.argmax(dim=-1)
                hit_C = likeliest_C == rows.labels_N[chunk]
                figures_R3[chunk] = torch.stack([overlap_C, agrees_C, hit_C], dim=1)
        return figures_R3

    def _matrix(self) -> tuple[Tensor, Tensor | None]:
        lm_head = self._draft.get_output_embeddings()
        bias_V = getattr(lm_head, "bias", None)
        if bias_V is not None:
            bias_V = bias_V[: self._shared] * self._scale
        return lm_head.weight[: self._shared], bias_V

    def _lessons(self, hidden_BTD: Tensor, objective: LossConfig, compute: torch.dtype) -> Lessons:
        return Lessons(self._teacher.reading(hidden_BTD), self._columns_V, objective, compute)
