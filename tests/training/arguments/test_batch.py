"""Default training batch sizes, and what they make of default learning rates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from transformers.trainer_pt_utils import AcceleratorConfig

from medusa_heads.config import HeadsConfig
from medusa_heads.files import read_json
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.batch import StepsBefore, check_filled, fit_batch
from medusa_heads.training.arguments.rates import RunArguments
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.record import changed_arguments, steps_before, write_run
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
        ({"learning_rate": 5e-3}, 200, 64, 16),  # that is meant for steps of this size
    ],
)
def test_little_text_is_learnt_in_small_steps(
    given: dict[str, Any], rows: int | None, learnt_of_row: float, chosen: int
) -> None:
    args = arguments(**given)
    for _ in range(2):
        fit_batch(args, rows, learnt_of_row)
        assert args.per_device_train_batch_size == chosen


class OfTwo(RunArguments):
    """Of one of two processes."""

    @property
    def world_size(self) -> int:
        return 2


def test_processes_share_a_step() -> None:
    args = arguments(gradient_accumulation_steps=2)
    args.__class__ = OfTwo
    assert fit_batch(args, 5_000, 128) == 1.0
    assert args.per_device_train_batch_size == 3  # of 10 rows, in two batches of each process
    # accelerate deals out one batch, which must be a multiple of their number.
    config: Any = AcceleratorConfig(split_batches=True)
    args.accelerator_config = config
    assert fit_batch(args, 200, 128) == 0.5 * 2**0.5
    assert args.per_device_train_batch_size == 2


@pytest.mark.parametrize(("split", "needed"), [(False, 12), (True, 6)])
def test_a_batch_of_all_processes_is_filled(split: bool, needed: int) -> None:
    args = arguments(per_device_train_batch_size=6)
    args.__class__ = OfTwo
    config: Any = AcceleratorConfig(split_batches=split)
    args.accelerator_config = config
    check_filled(args, 1)
    args.dataloader_drop_last = True
    for rows in (needed, None):  # None: of a stream
        check_filled(args, rows)
    with pytest.raises(ValueError, match=f"{needed - 1} rows do not fill one of {needed};"):
        check_filled(args, needed - 1)


@pytest.mark.parametrize(
    ("processes", "accumulated", "before", "kept"),
    [
        (1, 1, (8, 1, 1), 8),
        (1, 1, (8, 2, 1), 16),
        (2, 1, (8, 1, 1), 4),
        (2, 1, (3, 1, 1), 2),
        (2, 1, (8, 2, 1), 8),
        (2, 1, (8, 2, 1, True), 4),
        (1, 2, (16, 1, 1), 8),  # of half the memory
        (1, 1, (3, 1, 4), 12),
        (1, 1, (8, 8, 1), 16),  # no more than a process usually takes
        (1, 1, (40, 8, 1), 40),  # nor than it did
    ],
)
def test_a_resumed_run_keeps_the_rows_of_its_steps(
    processes: int, accumulated: int, before: tuple[Any, ...], kept: int
) -> None:
    # Whatever else is given.
    args = arguments(learning_rate=1e-3, max_steps=9, gradient_accumulation_steps=accumulated)
    args.__class__ = OfTwo if processes == 2 else RunArguments
    assert fit_batch(args, 200, 128, StepsBefore(*before)) == 1.0
    assert args.per_device_train_batch_size == kept
    args = arguments(per_device_train_batch_size=4)
    fit_batch(args, 200, 128, StepsBefore(*before))
    assert args.per_device_train_batch_size == 4


@pytest.mark.parametrize(
    ("rows", "learnt_of_row", "share"),
    [(4_000, 128, 1), (4_000, 16, 0.125**0.5), (1_000, 128, 0.5), (100, 128, 0.125**0.5)],
)
def test_small_steps_want_a_lower_rate(rows: int, learnt_of_row: float, share: float) -> None:
    assert fit_batch(arguments(), rows, learnt_of_row) == pytest.approx(share)


@pytest.mark.parametrize(
    "given", [{"max_steps": 30}, {"per_device_train_batch_size": 1}, {"learning_rate": 5e-3}]
)
def test_steps_that_were_not_made_smaller_keep_the_rate(given: dict[str, Any]) -> None:
    assert fit_batch(arguments(**given), 100, 12) == 1.0
    assert fit_batch(arguments(), None, 12) == 1.0  # of packed streams no row is known


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
    assert story["learning_rate"] == pytest.approx(5e-3 * (8 * 52 / 1_024) ** 0.5)
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.name == "checkpoint-10"

    for found in tmp_path.glob("checkpoint-*/trainer_state.json"):
        found.unlink()
    steps, story = run(num_train_epochs=2)
    rate = story["learning_rate"]
    assert (steps, story["per_device_train_batch_size"]) == (28, 3)
    assert rate == pytest.approx(5e-3 * (3 * 52 / 1_024) ** 0.5)
    steps, story = run(num_train_epochs=3)
    assert (steps, story["per_device_train_batch_size"], story["learning_rate"]) == (42, 3, rate)


@pytest.mark.parametrize("size", [None, "x", 0, -3, True])
def test_a_checkpoint_that_tells_nothing_of_its_steps(size: object, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps({"train_batch_size": size}))
    assert steps_before(str(tmp_path)) == steps_before(None) == StepsBefore()
    for given in ("3", "{accelerator_config: 3}"):
        (tmp_path / "run.yaml").write_text(f"target_loaded: [1]\ntraining_arguments: {given}\n")
        assert steps_before(str(tmp_path)) == StepsBefore()


def test_a_checkpoint_tells_whether_its_batches_were_split(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"train_batch_size": 8}')
    config: Any = AcceleratorConfig(split_batches=True)
    args = arguments()
    args.accelerator_config = config
    write_run(
        tmp_path,
        {"target_loaded": {"processes": 2}, "training_arguments": changed_arguments(args)},
    )
    assert steps_before(str(tmp_path)) == StepsBefore(8, 2, 1, split=True)


def test_a_full_batch_is_asked_for_when_its_size_is_known(
    target: TargetModel, make_rows: Callable[..., Dataset], tmp_path: Path
) -> None:
    def run(rows: int) -> None:
        args = arguments(num_train_epochs=1)
        args.dataloader_drop_last = True
        train_heads(
            target,
            make_rows(rows, length=56),
            eval_dataset=make_rows(4, seed=7),
            config=HeadsConfig(num_heads=1),
            output_dir=tmp_path,
            training_args=args,
        )

    with pytest.raises(ValueError, match="2 rows do not fill one of 3;"):
        run(2)
    run(3)
    assert read_json(tmp_path / "metrics.json")["steps"] == 1
