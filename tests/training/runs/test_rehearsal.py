"""A run in miniature, and what follows for a whole one: arithmetic with numbers made up, and real
runs in miniature. No test looks at a clock."""

from __future__ import annotations

import json
import logging
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from rich.console import Console
from torch import Tensor

from medusa_heads.cli.train_heads import main
from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.data.prepare import TrainingData, load_corpora, prepare_data
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.joint import JointObjective
from medusa_heads.training.runs.rehearsal import (
    Course,
    Line,
    Measured,
    _second_half,
    duration,
    forecast,
    padded,
    rehearse,
    show_forecast,
)
from tests.pairs import with_slow
from tests.training.runs.test_heads import quick

Rows = Callable[..., Dataset]


def prepared(target: TargetModel, rows: Dataset, held: Dataset, **settings: Any) -> TrainingData:
    told = DataArguments(dataset=["rows"], **settings)
    texts = load_corpora(told, rows, held)
    return prepare_data(target, *texts, None, told, num_heads=2, seed=0)


def test_what_is_always_there_is_told_from_what_grows() -> None:
    line = Line.through((100, 3.0), (200, 5.0))
    assert line == Line(1.0, 0.02) and line.at(1000) == pytest.approx(21.0)
    assert Line.through((100, 5.0), (200, 4.0)) == Line(4.0, 0.0)  # noise
    assert Line.through((100, 1.0), (200, 4.0)) == Line(0.0, 0.02)
    assert Line.through((7, 2.0), (7, 2.0)).at(7) == 2.0  # two sizes that are one


def test_a_forecast_by_hand() -> None:
    small = Measured(1000, 0.6, 400, 1.0, 300, 4.0, 1_000_000)
    large = Measured(2000, 1.1, 800, 1.5, 600, 5.0, 1_400_000)
    course = Course(100, 2, 1500.0, 2500, 3, 4000, 9000)
    found = forecast(small, large, course)
    assert found.training == pytest.approx(100 * 2 * (0.1 + 1500 * 0.0005))
    assert found.evaluating == pytest.approx(3 * (0.5 + 4000 * 0.00125))
    assert found.rest == pytest.approx(3.0 + 4096 / 300)  # no more positions are calibrated on
    assert found.memory == pytest.approx(600_000 + 2500 * 400)
    assert found.seconds == pytest.approx(found.training + found.evaluating + found.rest)
    assert forecast(replace(small, peak=None), large, course).memory is None
    assert duration(59.0) == "59.0 s" and duration(5400) == "1.5 h" and duration(90) == "1.5 min"


def test_tokens_of_batches_count_what_fills_them_up() -> None:
    assert padded(np.array([3, 9, 4, 2, 7]), 2) == 18 + 8 + 7


@pytest.mark.parametrize(
    "course",
    [
        pytest.param({"max_steps": -1, "num_train_epochs": 2}, marks=pytest.mark.slow),
        {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3},
        pytest.param({"max_steps": 7, "save_steps": 3}, marks=pytest.mark.slow),
        {"max_steps": 8, "save_steps": 0.25},
    ],
    ids=["epochs", "accumulated", "steps", "a share"],
)
def test_a_run_has_the_course_that_was_foreseen(
    course: dict[str, Any], target: TargetModel, texts: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    data = prepared(target, *texts)
    args = quick(tmp_path, **{"per_device_train_batch_size": 4, **course})
    foreseen = Course.of(data, args)
    config = HeadsConfig(num_heads=2)
    train_heads(target, data, config=config, training_args=args, output_dir=tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert foreseen.steps == metrics["steps"]
    assert foreseen.evaluations == len(report["training"]["evaluations"]) + 1
    assert foreseen.most_tokens == 4 * 40 and foreseen.tokens <= foreseen.most_tokens
    assert metrics["step_runtime"] > 0


def test_a_rehearsal_runs_all_of_it_and_leaves_nothing(
    target: TargetModel,
    texts: tuple[Dataset, Dataset],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = prepared(target, *texts)
    args = quick(tmp_path, per_device_train_batch_size=4, per_device_eval_batch_size=2)
    train = partial(train_heads, config=HeadsConfig(num_heads=2))
    before = target.weights_digest(), dict(vars(args))
    small, large = rehearse(train, target, data, args)
    assert (target.weights_digest(), dict(vars(args))) == before
    assert (small.tokens, large.tokens) == (2 * 40, 4 * 40)  # of the longest rows
    assert (small.read, large.read) == (33, 66) and small.learnt < large.learnt
    for measured in (small, large):
        assert all(math.isfinite(x) and x > 0 for x in (measured.step, measured.evaluation))
    assert not list(tmp_path.iterdir())
    assert not capsys.readouterr().out and not caplog.records
    assert logging.root.manager.disable == logging.NOTSET
    course = Course.of(data, args)
    console = Console(width=100, record=True)
    show_forecast(forecast(small, large, course), course, console)
    assert "the run, about" in console.export_text()


@pytest.mark.parametrize("packing", with_slow([True], [False]), ids=["packed", "one row"])
def test_a_batch_of_one_row_is_halved_in_length(
    packing: bool, target: TargetModel, texts: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    data = prepared(target, *texts, packing=packing, max_length=60)
    args = quick(tmp_path, per_device_train_batch_size=1, per_device_eval_batch_size=2)
    train = partial(train_heads, config=HeadsConfig(num_heads=2))
    small, large = rehearse(train, target, data, args)
    assert large.tokens == 2 * small.tokens == Course.of(data, args).most_tokens


@pytest.mark.parametrize(
    ("positions", "half"),
    [
        ([0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 0]),
        ([0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3]),
        ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3]),
    ],
)
def test_the_half_of_a_packed_row_begins_with_a_document(
    positions: list[int], half: list[int]
) -> None:
    row = {"input_ids": list(range(8)), "position_ids": positions}
    assert _second_half(row) == {"input_ids": [4, 5, 6, 7], "position_ids": half}


def test_rows_without_anything_to_learn_are_passed_over(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """As where long prompts are cut before their answers begin."""
    cut = [*make_rows(8, length=40, prompt=40), *make_rows(8, length=38, prompt=37)]
    rows, held = (Dataset.from_list([*cut, *make_rows(count)]) for count in (8, 4))
    data = prepared(target, Dataset.from_list([*rows, *make_rows(8, 36)]), held)
    args = quick(tmp_path, per_device_train_batch_size=16, per_device_eval_batch_size=4)
    small, large = rehearse(
        partial(train_heads, config=HeadsConfig(num_heads=2)), target, data, args
    )
    assert (small.tokens, large.tokens) == (8 * 38, 16 * 38)
    assert (small.learnt, large.learnt) == (20 + 1, 20 + 3)


def test_the_first_of_two_runs_in_miniature_is_not_held_in_the_second(
    target: TargetModel, texts: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    made: list[weakref.ref[Any]] = []

    def train(*args: Any, **given: Any) -> None:
        assert not any(heads() is not None for heads in made)
        made.append(weakref.ref(train_heads(*args, **given, config=HeadsConfig(num_heads=2))))

    rehearse(train, target, prepared(target, *texts), quick(tmp_path))
    assert len(made) == 2


def test_joint_training_is_measured_behind_its_warm_up(
    target: TargetModel, make_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[bool] = []
    forward = JointObjective.forward

    def watched(self: JointObjective, *args: Any, **given: Any) -> Tensor:
        alone.append(given["heads_alone"])
        return forward(self, *args, **given)

    monkeypatch.setattr(JointObjective, "forward", watched)
    target.model.save_pretrained(tmp_path / "target")
    make_rows(20).to_json(tmp_path / "rows.jsonl")
    flags = ["--model_name_or_path", str(tmp_path / "target"), "--dry_run", "--joint"]
    flags += ["--dataset", str(tmp_path / "rows.jsonl"), "--joint_warmup_steps", "50"]
    assert main([*flags, "--lora_r", "2", "--training_args", '{"use_cpu": true}']) == 0
    assert len(alone) == 8 and not any(alone)


def test_a_dry_run_measures_where_the_weights_are(
    target: TargetModel,
    make_rows: Rows,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target.model.save_pretrained(tmp_path / "target")
    make_rows(20).to_json(tmp_path / "rows.jsonl")
    flags = ["--model_name_or_path", str(tmp_path / "target"), "--dry_run"]
    flags += ["--dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "run")]
    flags += ["--per_device_train_batch_size", "4", "--training_args", '{"use_cpu": true}']
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert "memory of a process, computed" in shown and "Measured on this machine" in shown
    assert "48 tokens took" in shown and "the run, about" in shown
    for reason, more in {
        "measure_steps is off": ["--measure_steps", "false"],
        "the target's weights are not on this disk": [],
    }.items():
        if not more:
            (tmp_path / "target" / "model.safetensors").unlink()
        assert main([*flags, *more]) == 0
        assert f"No step was measured: {reason}." in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "run").exists()
