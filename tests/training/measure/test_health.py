"""Runs that go wrong say so once, early; healthy ones say nothing."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers.trainer_utils import IntervalStrategy

from medusa_heads.cli.train_heads import main
from medusa_heads.config import IGNORED, HeadsConfig
from medusa_heads.heads import new_heads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.draft import DraftArguments
from medusa_heads.training.loss.teacher import Teacher
from medusa_heads.training.measure.health import falling, surprise
from medusa_heads.training.runs.draft import train_draft
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from tests.training.conftest import VOCAB
from tests.training.runs.test_heads import quick

Rows = Callable[..., Dataset]


@pytest.fixture
def learnt(target: TargetModel, make_rows: Rows) -> TargetModel:
    """The target, trained on such rows until it is sure of them: once for all tests."""
    if not _learnt:
        ids_BT = torch.tensor(make_rows(64)["input_ids"])
        target.model.requires_grad_(True)
        optimiser = torch.optim.AdamW(target.model.parameters(), lr=1e-2)
        for _ in range(60):
            target.model(input_ids=ids_BT, labels=ids_BT).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        target.freeze()
        _learnt.update(copy.deepcopy(target.model.state_dict()))
    target.model.load_state_dict(_learnt)
    return target


_learnt: dict[str, Any] = {}


def noise(count: int) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCAB, (count, 24), generator=generator).tolist()
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = (record for record in caplog.records if record.name.startswith("medusa_heads"))
    return [record.getMessage() for record in own if record.levelno >= logging.WARNING]


def kept(folder: Path) -> list[str]:
    found: list[str] = json.loads((folder / "metrics.json").read_text())["warnings"]
    return found


@pytest.mark.parametrize("draft", [False, True], ids=["heads", "draft model"])
def test_a_text_that_the_target_would_not_write_is_said_once(
    draft: bool,
    learnt: TargetModel,
    make_rows: Rows,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(rows: Dataset, name: str) -> list[str]:
        caplog.clear()
        given: dict[str, Any] = {"eval_dataset": make_rows(8), "output_dir": tmp_path / name}
        best = {"metric_for_best_model": "loss"} if draft else {}
        args = quick(tmp_path, steps=4, learning_rate=1e-3, **best)
        if draft:
            train_draft(learnt, rows, training_args=args, draft=DraftArguments(), **given)
        else:
            train_heads(learnt, rows, training_args=args, **given)
        assert kept(tmp_path / name) == warned(caplog)
        return warned(caplog)

    assert run(make_rows(40), "own") == []
    (sentence,) = run(noise(40), "noise")
    assert sentence.startswith("the target would not write the text of the training set: its perp")


def test_drawn_tokens_are_not_judged(
    learnt: TargetModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heads = new_heads(learnt, HeadsConfig(num_heads=1))
    args = quick(tmp_path, steps=4, learning_rate=1e-3)
    trainer = HeadsTrainer(heads, learnt, args, noise(40), noise(8))
    trainer.health.leave_text_unjudged()
    trainer.train()
    assert warned(caplog) == []


def test_a_run_that_goes_on_keeps_what_was_said(
    learnt: TargetModel, make_rows: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From the middle, and where it had come to its end."""

    def run(**more: Any) -> list[str]:
        caplog.clear()
        args = quick(tmp_path, steps=4, learning_rate=1e-3, save_steps=3)
        given: dict[str, Any] = {"eval_dataset": make_rows(8), "output_dir": tmp_path / "run"}
        train_heads(learnt, noise(40), training_args=args, **given, **more)
        assert kept(tmp_path / "run") == [each for each in warned(caplog) if "earlier" not in each]
        return kept(tmp_path / "run")

    (said,) = run()
    assert run(resume_from_checkpoint="last") == [said]
    assert run(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3")) == [said]


def test_a_text_is_judged_from_where_a_stopped_run_had_come_to(
    learnt: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """The sums of the steps before the checkpoint count; nothing had been said there."""

    def run(**more: Any) -> list[str]:
        args = quick(tmp_path, steps=2, learning_rate=1e-3, save_steps=1)
        given: dict[str, Any] = {"eval_dataset": make_rows(8), "output_dir": tmp_path / "run"}
        train_heads(learnt, noise(40), training_args=args, **given, **more)
        return kept(tmp_path / "run")

    (said,) = run()
    first = tmp_path / "run" / "checkpoint-1"
    assert said not in (first / "trainer_state.json").read_text()
    assert run(resume_from_checkpoint=str(first)) == [said]


def test_the_loss_and_the_entropy_are_the_targets_own(learnt: TargetModel, make_rows: Rows) -> None:
    ids_BT = torch.tensor(make_rows(3)["input_ids"])
    labels_BT = ids_BT.clone()
    labels_BT[:, :5] = IGNORED
    hidden_BTD = learnt.hidden(ids_BT)
    with torch.no_grad():
        log_p_BTV = learnt.model(input_ids=ids_BT).logits[:, 4:-1].log_softmax(-1)
    loss = -log_p_BTV.gather(2, ids_BT[:, 5:, None]).sum()
    entropy = -(log_p_BTV.exp() * log_p_BTV).sum()
    expected_3 = torch.stack([loss, entropy, torch.tensor(3.0 * 19)])
    sums_3 = surprise(Teacher.from_target(learnt), hidden_BTD, {"labels": labels_BT})
    torch.testing.assert_close(sums_3, expected_3, rtol=1e-4, atol=1e-4)


def test_tokens_per_step_that_fall_are_said_once(
    target: TargetModel, make_rows: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Held out is what the target writes again and again, which fresh heads foresee; other text
    drives it out of them."""
    prompts = torch.tensor(make_rows(8, length=4)["input_ids"])
    model: Any = target.model
    texts = model.generate(prompts, max_new_tokens=44, min_new_tokens=44, do_sample=False)
    rows = [{"input_ids": row[-24:], "labels": row[-24:]} for row in texts.tolist()]
    train_heads(
        target,
        make_rows(40),
        eval_dataset=Dataset.from_list(rows),
        output_dir=tmp_path / "run",
        training_args=quick(tmp_path, steps=24, save_steps=4, learning_rate=5e-2),
    )
    (sentence,) = warned(caplog)
    assert sentence.startswith("tokens per step have fallen on held-out text, from ")
    assert kept(tmp_path / "run") == [sentence]
    assert f"**Warning:** {sentence}." in (tmp_path / "run" / "report.md").read_text()


def test_tokens_per_step_fall_by_more_than_they_vary() -> None:
    def log(*values: float) -> list[dict[str, float]]:
        lines = ({"step": 10 * i, "eval_tokens_per_step_8": v} for i, v in enumerate(values))
        return [{"step": 0, "loss": 1.0}, *lines]

    assert falling(log()) is falling(log(2.0)) is falling(log(2.0, 1.91, 2.2)) is None
    sentence = falling(log(2.0, 2.2, 2.0))
    assert sentence == falling(log(2.0, 2.2, 2.0, 3.0))
    assert sentence == (
        "tokens per step have fallen on held-out text, from 2.20 in step 10 to 2.00 in step 20: "
        "train for fewer steps (early_stopping_patience), with a lower learning_rate, or on more "
        "text"
    )


@pytest.mark.parametrize(
    ("every", "message"),
    [
        (1, "the held-out loss is not finite by step 1: start anew with a learning_rate below 1e"),
        (9, "the loss is not finite in step 2: start anew with a learning_rate below 1e\\+38, or"),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run(
    every: int, message: str, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    args = quick(tmp_path, steps=9, save_steps=every, learning_rate=1e38, warmup_share=0.0)
    with pytest.raises(ValueError, match=message):
        train_heads(target, make_rows(40), output_dir=tmp_path / "run", training_args=args)
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_checkpoints_before_the_fault_are_kept(
    target: TargetModel,
    make_rows: Rows,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One token of one row breaks the target; the command ends with exit code 2."""
    last = VOCAB - 1
    weight_VD = target.get_input_embeddings().weight.data
    weight_VD[last] = float("nan")
    rows = [row for row in make_rows(60) if last not in row["input_ids"]][:24]
    rows[1]["input_ids"][3] = last  # a prompt's: not learnt
    target.model.save_pretrained(tmp_path / "target")
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    Dataset.from_list(rows[4:8]).to_json(tmp_path / "held_out.jsonl")
    flags = {
        "model_name_or_path": tmp_path / "target",
        "dataset": tmp_path / "rows.jsonl",
        "eval_dataset": tmp_path / "held_out.jsonl",
        "output_dir": tmp_path / "run",
        "max_steps": 6,
        "save_steps": 1,
        "save_total_limit": 9,
        "per_device_train_batch_size": 4,
        "dtype": "float32",
        "training_args": json.dumps({"use_cpu": True, "disable_tqdm": True}),
    }
    assert main([f"--{name}={value}" for name, value in flags.items()]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(
        "error: the target's hidden states are not finite in torch.float32: load it in another "
        "dtype, bfloat16 or float32"
    )
    checkpoints = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert checkpoints and len(checkpoints) < 6
    assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize("evaluated", [True, False], ids=["evaluated", "in the end"])
def test_held_out_text_that_breaks_the_target_is_not_blamed_on_the_rate(
    evaluated: bool, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    last = VOCAB - 1
    target.get_input_embeddings().weight.data[last] = float("nan")
    rows = [row for row in make_rows(60) if last not in row["input_ids"]]
    held_out = [{**row, "input_ids": [last, *row["input_ids"][1:]]} for row in rows[:2]]
    args = quick(tmp_path, steps=2, load_best_model_at_end=evaluated)
    if not evaluated:
        args.eval_strategy = IntervalStrategy.NO
    given = {"eval_dataset": Dataset.from_list(held_out), "output_dir": tmp_path / "run"}
    with pytest.raises(ValueError, match="the target's hidden states are not finite"):
        train_heads(target, Dataset.from_list(rows[2:]), training_args=args, **given)
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_few_supervised_tokens_are_said_once(
    target: TargetModel, make_rows: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = Dataset.from_list([*make_rows(30, length=64, prompt=64), *make_rows(2, 64, prompt=60)])
    args = quick(tmp_path, steps=2)
    given = {"eval_dataset": make_rows(4), "config": HeadsConfig(num_heads=1)}
    train_heads(target, few, output_dir=tmp_path / "run", training_args=args, **given)
    (sentence,) = warned(caplog)
    assert sentence.startswith("only 0.39 % of the tokens in the training set are supervised")
    assert kept(tmp_path / "run") == [sentence]
