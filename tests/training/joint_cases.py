"""Heads, adapters and runs that the tests of joint training share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import (
    TrainingArguments,
)

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.joint_config import JointConfig
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.data.columns import collate

Rows = Callable[..., Dataset]
SMALL = JointConfig(lora_r=4, lora_alpha=8, warmup_steps=2, learning_rate=5e-3)


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 2e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "load_best_model_at_end": False,
        "training_args": {"use_cpu": True, "disable_tqdm": True, "eval_strategy": "no"},
    }
    return to_training_arguments(OptimisationArguments(**{**values, **changed}), "shared")


def fresh(target: TargetModel, **config: Any) -> DraftHeads:
    return new_heads(target, HeadsConfig(num_heads=3, **config))


def disturb(model: PeftModel) -> None:
    """An adapter that has learnt something: fresh ones are zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def text(make_rows: Rows) -> dict[str, Tensor]:
    return collate([*make_rows(2, length=12), *make_rows(1, length=9, seed=5)])
