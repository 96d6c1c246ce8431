"""Heads of a target that scales its logits learn what those of the same target without do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import GraniteConfig, GraniteForCausalLM

from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.runs.heads import train_heads
from tests.training.runs.test_heads import quick

SCALING = 8.0  # a power of two, which rounds nothing


def scaled(target: TargetModel) -> TargetModel:
    """A Granite with the same hidden states and logits, whose lm_head says so many times more."""
    given = target.config.to_dict() | {
        "attention_multiplier": target.config.head_dim**-0.5,
        "logits_scaling": SCALING,
        "model_type": "granite",
    }
    model = GraniteForCausalLM(GraniteConfig(**given))
    model.load_state_dict(target.model.state_dict())
    with torch.no_grad():
        model.lm_head.weight.mul_(SCALING)
    made = TargetModel(model)
    made.freeze()
    return made


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_heads_learn_the_same(
    target: TargetModel, make_rows: Callable[..., Dataset], tmp_path: Path, kind: Any
) -> None:
    learnt: list[Any] = []
    for each in (target, scaled(target)):
        heads = train_heads(
            each,
            make_rows(16),
            eval_dataset=make_rows(4, seed=7),
            config=HeadsConfig(kind=kind, num_heads=2),
            output_dir=tmp_path / str(len(learnt)),
            training_args=quick(tmp_path, 2),
        )
        learnt.append(heads)
    plain, other = learnt
    assert (plain.config.logit_scale, other.config.logit_scale) == (1, 1 / SCALING)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, atol=1e-4, rtol=1e-3)
