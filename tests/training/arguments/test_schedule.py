"""Schedules of short runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from tests.training.runs.test_heads import quick


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.05), (3, 0.9), (3, 3), (2, 5)])
def test_a_run_may_end_within_its_warm_up(
    steps: int,
    warmup: float,
    target: TargetModel,
    make_rows: Callable[..., Dataset],
    tmp_path: Path,
) -> None:
    """Under every schedule it has the rates of a linear one: `polynomial` divides by the steps
    behind the warm-up."""

    def rates(schedule: str) -> list[float]:
        more: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "warmup_steps": warmup}
        more |= {"eval_strategy": "no", "save_strategy": "no"}
        course = {"lr_scheduler_type": schedule, "logging_steps": 1, "training_args": more}
        args = quick(tmp_path, steps, **course, load_best_model_at_end=False)
        heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=1))
        trainer = HeadsTrainer(heads, target, args, make_rows(4))
        trainer.train()
        assert args.warmup_steps == warmup
        return [e["learning_rate"] for e in trainer.state.log_history if "learning_rate" in e]

    expected = rates("linear")
    assert rates("polynomial") == expected and len(expected) == steps
