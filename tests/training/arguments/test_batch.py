"""Default training batch sizes, and what they make of default learning rates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset

from medusa_heads.config import HeadsConfig
from medusa_heads.files import read_json
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.batch import fit_batch, rate_share
from medusa_heads.training.arguments.rates import RunArguments
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.resumable import last_checkpoint


def arguments(**given: Any) -> RunArguments:
    quiet = {"use_cpu": True, "disable_tqdm": True}
    return to_training_arguments(OptimisationArguments(training_args=quiet, **given), "shared")


@pytest.mark.parametrize(
    ("given", "rows", "learnt_of_row", "chosen"),
    [
        ({}, 100_000, 128, 16),  # as many as a step of much text has
        ({}, 5_000, 128, 10),
        ({"num_train_epochs": 1}, 5_000, 128, 5),
        ({}, 200, 64, 2),  # no fewer tokens than these
        ({}, 200, 3, 16),
        ({}, None, 128, 16),  # of a stream nobody knows how much it is
        ({"max_steps": 30}, 200, 128, 16),  # nor here
        ({"gradient_accumulation_steps": 4}, 5_000, 128, 3),
        ({"per_device_train_batch_size": 16}, 200, 64, 16),
    ],
)
def test_little_text_is_learnt_in_small_steps(
    given: dict[str, Any], rows: int | None, learnt_of_row: float, chosen: int
) -> None:
    args = arguments(**given)
    for _ in range(2):
        fit_batch(args, rows, learnt_of_row)
        assert args.per_device_train_batch_size == chosen


def test_a_resumed_run_keeps_its_batch_size() -> None:
    args = arguments()
    fit_batch(args, 200, 128, before=8)
    assert args.per_device_train_batch_size == 8
    args = arguments(per_device_train_batch_size=4)
    fit_batch(args, 200, 128, before=8)
    assert args.per_device_train_batch_size == 4


@pytest.mark.parametrize(
    ("rows", "together", "learnt_of_row", "share"),
    [(8, 1, 128, 1), (16, 1, 2_000, 1), (2, 1, 128, 0.5), (1, 2, 128, 0.5), (1, 1, 9, 0.125**0.5)],
)
def test_small_steps_want_a_lower_rate(
    rows: int, together: int, learnt_of_row: float, share: float
) -> None:
    args = arguments(per_device_train_batch_size=rows, gradient_accumulation_steps=together)
    assert rate_share(args, learnt_of_row) == pytest.approx(share)


def test_a_run_chooses_by_its_text_and_goes_on_so(
    target: TargetModel, make_rows: Callable[..., Dataset], tmp_path: Path
) -> None:
    def run(**given: Any) -> tuple[int, dict[str, Any]]:
        train_heads(
            target,
            make_rows(40, length=56),  # 52 tokens of each are learnt
            eval_dataset=make_rows(4, seed=7),
            config=HeadsConfig(num_heads=1),
            output_dir=tmp_path,
            training_args=arguments(save_total_limit=9, **given),
            resume_from_checkpoint="auto",
        )
        story = yaml.safe_load((tmp_path / "run.yaml").read_text())["training_arguments"]
        return read_json(tmp_path / "metrics.json")["steps"], story

    steps, story = run(num_train_epochs=1, per_device_train_batch_size=8)
    assert (steps, story.get("per_device_train_batch_size", 8)) == (5, 8)
    steps, story = run(num_train_epochs=2)
    assert (steps, story.get("per_device_train_batch_size", 8)) == (10, 8)
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.name == "checkpoint-10"

    for found in tmp_path.glob("checkpoint-*/trainer_state.json"):
        found.unlink()
    steps, story = run(num_train_epochs=2)
    assert (steps, story["per_device_train_batch_size"]) == (28, 3)
    assert story["learning_rate"] == pytest.approx(5e-3 * (3 * 52 / 1_024) ** 0.5)
