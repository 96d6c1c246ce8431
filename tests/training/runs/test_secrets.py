"""No file that a run leaves holds a secret, wherever one was put."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from transformers import TrainingArguments

from medusa_heads.checkpoint.draft_checkpoint import save_draft
from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.runs.draft import DraftTrainer
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.record import changed_arguments, write_run

Rows = Callable[..., Dataset]
SECRET = "hunter2hunter2"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz12345678"
PRIVATE = "/home/somebody/merger"


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    values: dict[str, Any] = {"use_cpu": True, "max_steps": 2, "per_device_train_batch_size": 4}
    values |= {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    return TrainingArguments(str(folder), **(values | {"report_to": "none"} | settings))


def assert_nowhere(folder: Path, *secrets: str) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        for secret in secrets:
            assert secret.encode() not in content, path


def test_of_a_run(
    target: TargetModel, make_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(sys, "argv", [f"{PRIVATE}/train-heads", f"--hub_token={SECRET}", PRIVATE])
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "run" / "log"))
    train_heads(
        target,
        make_rows(8),
        eval_dataset=make_rows(4, seed=1),
        config=HeadsConfig(num_heads=1),
        output_dir=tmp_path / "run",
        training_args=arguments(
            tmp_path,
            hub_token=TOKEN,
            hub_model_id=PRIVATE,
            report_to="tensorboard",
            load_best_model_at_end=True,
        ),
        record={
            "data": {"dataset": [f"https://me:{SECRET}@host/rows.jsonl?token={SECRET}"]},
            "notes": [{"deep": ("x", {"api_key": SECRET})}, f"--password={SECRET}", TOKEN],
        },
    )
    folder = tmp_path / "run"
    assert (folder / "checkpoint-2" / "training_args.bin").is_file()
    assert list((folder / "log").rglob("events*"))
    run = yaml.safe_load((folder / "run.yaml").read_text())
    assert run["command"] == "train-heads" and "argv" not in run
    assert run["notes"] == [{"deep": ["x", {"api_key": "***"}]}, "--password=***", "***"]
    assert set(run["training_arguments"]) >= {"max_steps", "save_steps"}
    for name in ("run.yaml", "medusa_heads.json", "checkpoint-2/run.yaml"):
        text = (folder / name).read_text()
        assert PRIVATE not in text and str(tmp_path) not in text, name
    assert_nowhere(folder, SECRET, TOKEN)


def test_of_every_training_argument(tmp_path: Path) -> None:
    """Allowed are settings that tell of the course, by name; what is not known is not written."""
    args = arguments(tmp_path, hub_token=TOKEN, lr_scheduler_kwargs={"a": {"password": SECRET}})
    for name in ("project", "run_name", "logging_dir", "trackio_space_id", "hub_revision"):
        setattr(args, name, SECRET)
    write_run(tmp_path, {"training_arguments": changed_arguments(args), "x": [{"pwd": SECRET}]})
    assert_nowhere(tmp_path, SECRET, TOKEN, str(tmp_path))


def test_of_a_draft_model(target: TargetModel, make_rows: Rows, tmp_path: Path) -> None:
    save_draft(
        tmp_path / "d", target.model, target, provenance={"a": [{"token": SECRET}], "b": TOKEN}
    )
    assert_nowhere(tmp_path / "d", SECRET, TOKEN)
    args = arguments(tmp_path, push_to_hub=True)
    with pytest.raises(ValueError, match="push_to_hub has no place in this training"):
        DraftTrainer(target.model, target, args, make_rows(4), objective=LossConfig())


@pytest.mark.parametrize("name", ["hub_token", "push_to_hub", "hub_model_id"])
def test_no_token_is_taken_from_a_command_line(name: str) -> None:
    for given in ({name: SECRET}, f'{{"{name}": "{SECRET}"}}'):
        with pytest.raises(ValueError, match=f"{name!r} has no place here") as raised:
            to_training_arguments(OptimisationArguments(training_args=given), "shared")
        assert SECRET not in str(raised.value)
    for broken in (f'{{"hub_token": "{SECRET}"', f'[{{"hub_token": "{SECRET}"}}]'):
        with pytest.raises(ValueError, match="training_args must") as raised:
            to_training_arguments(OptimisationArguments(training_args=broken), "shared")
        assert SECRET not in str(raised.value)


def test_the_command_line_that_trackers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--run_name", "a", "--output_dir", f"https://me:{SECRET}@host/x"]
    monkeypatch.setattr(sys, "argv", ["train-heads", *given])
    (parsed,) = parse_arguments((OptimisationArguments,), None, prog="x", description="")
    assert SECRET in parsed.output_dir and SECRET not in " ".join(sys.argv)
