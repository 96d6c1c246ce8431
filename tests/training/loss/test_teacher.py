"""The teacher's logits are the target's, whatever follows its lm_head, and each is made once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.teacher import Lessons, Teacher
from scripts.prove.tiny_models import builder
from tests.training.loss_cases import DRAFT_TOKENS, W, random_rows, random_teacher

WIDE = (0.3, 0.3)


@pytest.mark.parametrize(
    ("kind", "scale", "cap"),
    [
        ("llama", 1.0, None),
        ("phi", 1.0, None),  # a bias
        ("gemma2", 1.0, 30.0),
        ("cohere", 0.0625, None),
        ("granite", 0.25, None),
        ("falcon_h1", 0.5, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_logits_are_the_models_own(
    kind: str, scale: float, cap: float | None, dtype: torch.dtype
) -> None:
    model = builder(kind)(WIDE)
    for name, value in (("logits_scaling", 4.0), ("lm_head_multiplier", 0.5)):
        if hasattr(model.config, name):
            setattr(model.config, name, value)
    for module in (model, model.model):
        for name in ("logits_scaling", "lm_head_multiplier"):
            if hasattr(module, name):
                setattr(module, name, getattr(model.config, name))
    target = TargetModel(model.to(dtype))
    ids_BT = torch.arange(24).view(2, 12)
    teacher = Teacher.from_target(target).reading(target.hidden(ids_BT))
    assert (teacher.scale, teacher.cap) == (scale, cap)
    lesson = Lessons(teacher, None, LossConfig({"forward_kl": 1.0}), dtype).of(torch.arange(24))
    with torch.no_grad():
        expected_PV = model(ids_BT).logits.float().log_softmax(dim=-1).flatten(0, 1)
    exact = dtype is torch.float32
    torch.testing.assert_close(
        lesson.log_p_UV, expected_PV, rtol=1e-4 if exact else 0, atol=1e-4 if exact else 0.1
    )


def test_a_target_that_makes_its_logits_otherwise_is_refused() -> None:
    model = builder("cohere")(WIDE)
    model.logit_scale = 0.5  # the configuration still says 0.0625
    with pytest.raises(ValueError, match="makes its logits in a way that is not known here"):
        Teacher.from_target(TargetModel(model))


def test_pairs_that_predict_the_same_token_share_a_row() -> None:
    teacher = random_teacher(random_rows(9, 2))
    lessons = Lessons(teacher, None, LossConfig({"forward_kl": 1.0}), torch.float64)
    positions_C = torch.tensor([1, 2, 3, 2, 3, 4, 3, 4, 5])
    lesson = lessons.of(positions_C)
    assert lesson.p_UV.shape == (5, W)
    apart = lessons.of(torch.tensor([4]))
    torch.testing.assert_close(lesson.p_UV[lesson.rows_C[5]], apart.p_UV[0])


@pytest.mark.parametrize("name", ["forward_kl", "acceptance"])
def test_a_reduced_vocabulary_costs_a_full_product_only_where_the_rest_counts(name: str) -> None:
    teacher = replace(random_teacher(random_rows(9, 2)), cap=None)
    objective = LossConfig({name: 1.0})
    lessons = Lessons(teacher, DRAFT_TOKENS, objective, torch.float64)
    assert lessons.width == (W if objective.needs_overlap else len(DRAFT_TOKENS))
    lesson = lessons.of(torch.arange(9))
    torch.testing.assert_close(lesson.p_UV.sum(dim=1), torch.ones(9, dtype=torch.float64))
    whole = Lessons(teacher, None, objective, torch.float64).of(torch.arange(9)).p_UV
    torch.testing.assert_close(
        lesson.share_UV if objective.needs_overlap else lesson.p_UV,
        whole[:, DRAFT_TOKENS]
        / (1 if objective.needs_overlap else whole[:, DRAFT_TOKENS].sum(dim=1, keepdim=True)),
    )
