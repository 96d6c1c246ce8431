"""Runs of the same training with different caches of hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.runs.heads import train_heads

SHAPES = {
    "medusa": HeadsConfig(num_heads=2),
    "own matrices": HeadsConfig(num_heads=2, vocab_matrix="own"),
    "hydra": HeadsConfig(kind="hydra", num_heads=2),
    "corrected": HeadsConfig(num_heads=2, correction_rank=4),
    "eagle3": HeadsConfig(kind="eagle3", num_heads=2),
    "prefix": HeadsConfig(kind="hydra", num_heads=2, prefix_attention=True),
    "induction": HeadsConfig(kind="hydra", num_heads=2, induction=True),
    "features": HeadsConfig(num_heads=2, features=[0]),
    "block": HeadsConfig(kind="block", num_heads=2, correction_rank=4),
}


class _Counting(TargetModel):
    """Counts its forwards; its views count along."""

    runs: Runs

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        self.runs.forwards += 1
        return super().hidden(*args, **kwargs)


class Runs:
    """Runs of the same training with different caches."""

    def __init__(self, target: TargetModel, texts: tuple[Dataset, Dataset], folder: Path) -> None:
        self.target = _Counting(target.model)
        self.target.runs = self
        self.texts = texts
        self.folder = folder
        self.shape = SHAPES["medusa"]
        self.objective: LossConfig | None = None
        self.forwards = 0
        self.count = 0

    def __call__(self, mode: str, output: str | None = None, **changed: Any) -> dict[str, Tensor]:
        """The trained weights; `forwards` says how often the target ran."""
        self.count += 1
        self.forwards = 0
        output = output or f"run{self.count}"
        resume = changed.pop("resume", None)
        further = {"use_cpu": True, "disable_tqdm": True, **changed.pop("further", {})}
        values = {
            "output_dir": str(self.folder / output),
            "num_train_epochs": 1,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 2,
            "learning_rate": 2e-2,
            "training_args": further,
        }
        cache_dir = None if mode == "off" else str(self.folder / "cache")
        stored_in = changed.pop("stored_in", "auto")
        heads = train_heads(
            self.target,
            self.texts[0],
            eval_dataset=self.texts[1],
            config=self.shape,
            objective=self.objective,
            output_dir=self.folder / output,
            training_args=to_training_arguments(
                OptimisationArguments(**{**values, **changed}), self.shape.vocab_matrix
            ),
            hidden_cache=CacheArguments(mode, cache_dir, stored_in),  # type: ignore[arg-type]
            resume_from_checkpoint=resume,
        )
        metrics = json.loads((self.folder / output / "metrics.json").read_text())
        self.eval_loss = metrics["eval_loss"]
        return heads.state_dict()

    def shards(self) -> list[Path]:
        return sorted((self.folder / "cache").glob("*/*.states"))


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether weights are bitwise equal."""
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())
