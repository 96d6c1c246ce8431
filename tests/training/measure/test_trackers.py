"""What trackers, and a program's own callbacks, are told of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.runs.draft import train_draft
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from tests.inference.speaking import make_tokenizer
from tests.training.runs.test_heads_trainer import arguments, fresh

Rows = Callable[..., Dataset]


@pytest.mark.slow
def test_wandb_records_the_run_offline(
    target: TargetModel, make_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    args = arguments(
        tmp_path / "run", report_to="wandb", max_steps=2, eval_strategy="steps", eval_steps=1
    )
    sets = make_rows(4), make_rows(2, seed=1)
    HeadsTrainer(fresh(target), target, args, *sets, tokenizer=make_tokenizer(None)).train()
    try:
        summary = json.loads(json.dumps(dict(wandb.run.summary), default=str))
        assert {"eval/head0_top1", "eval/head0_accepted"} <= set(summary)
        assert "|" in summary["eval/accepted_text"]
    finally:
        wandb.finish()
    recorded = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(recorded) == 1 and os.path.getsize(recorded[0]) > 0


def test_tensorboard_records_the_run(target: TargetModel, make_rows: Rows, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    args = arguments(
        tmp_path / "run", report_to="tensorboard", max_steps=2, eval_strategy="steps", eval_steps=1
    )
    train_heads(
        target,
        make_rows(4),
        eval_dataset=make_rows(2, seed=1),
        config=HeadsConfig(num_heads=2),
        output_dir=tmp_path / "run",
        training_args=args,
        tokenizer=make_tokenizer(None),
    )
    scalars: dict[str, list[int]] = {}
    texts = []
    for folder in (tmp_path / "run" / "runs").iterdir():
        events = accumulator.EventAccumulator(str(folder))
        events.Reload()
        for name in events.Tags()["scalars"]:
            scalars.setdefault(name, []).extend(event.step for event in events.Scalars(name))
        for event in events.Tensors("eval/accepted_text/text_summary"):
            texts += [value.decode() for value in event.tensor_proto.string_val]
    assert {"train/loss", "eval/loss"} <= set(scalars)
    for name in ("tokens_per_step_32", "head0_top1", "head0_accepted", "head1_accepted"):
        assert scalars[f"eval/{name}"] == [1, 2]
    for name in ("temperature", "calibration_error", "calibration_error_at_temperature"):
        assert scalars[f"eval/head1_{name}"] == [2]
    # The first held-out text, from its first supervised token on, in pieces.
    first = make_rows(2, seed=1)[0]["input_ids"][4:]
    whole = str(make_tokenizer(None).decode(first))
    assert len(texts) == 2 and all("|" in text for text in texts)
    assert all(whole.startswith(text.replace("|", "")[:12]) for text in texts)


class Ends(TrainerCallback):
    """Ends a run behind its second step, and remembers what was measured."""

    def __init__(self) -> None:
        self.measured: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop |= state.global_step == 2

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.measured.append(more["metrics"])


@pytest.mark.parametrize("train", [train_heads, train_draft])
def test_callbacks_of_a_program_watch_a_run_and_end_it(
    train: Callable[..., Any], target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    ends = Ends()
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2)
    sets: Any = {"dataset": make_rows(8), "eval_dataset": make_rows(2, seed=1)}
    train(target, **sets, output_dir=tmp_path, training_args=args, callbacks=[ends])
    assert json.loads((tmp_path / "metrics.json").read_text())["steps"] == 2
    assert len(ends.measured) == 1 and "eval_loss" in ends.measured[0]
