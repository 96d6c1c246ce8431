"""Best heads, early stopping, Ctrl-C, SIGTERM, and a full disk."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import SchedulerType, TrainerCallback

from medusa_heads.config import HeadsConfig
from medusa_heads.errors import is_disk_full
from medusa_heads.heads import MedusaHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.runs.callbacks import Interruptions
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.training.runs.resumable import is_whole, last_checkpoint
from tests.pairs import with_slow
from tests.training.runs.test_heads import quick

Rows = Callable[..., Dataset]


def measured(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return values


@pytest.mark.parametrize(
    ("metric", "save_steps"), with_slow([("loss", 12)], [("loss", 2), ("tokens_per_step_32", 2)])
)
def test_the_final_heads_are_the_best_ones(
    metric: str, save_steps: int, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """Also where they were evaluated between two checkpoints."""
    # A rate that soon leads away from what the first steps have found.
    often: Any = {"eval_steps": 2, "save_steps": save_steps}
    wild = quick(tmp_path, 12, metric_for_best_model=metric, learning_rate=3.0, **often)
    heads = train_heads(
        target,
        make_rows(20),
        eval_dataset=make_rows(20, seed=9),
        config=HeadsConfig(num_heads=2),
        output_dir=tmp_path,
        training_args=wild,
    )
    newest = last_checkpoint(tmp_path)
    assert newest is not None
    state = json.loads((newest / "trainer_state.json").read_text())
    name = f"eval_{metric}"
    curve = {e["step"]: e[name] for e in state["log_history"] if name in e}
    best = min(curve, key=lambda step: curve[step] * (1 if metric == "loss" else -1))
    found = measured(tmp_path)
    assert (found["best_step"], found[name]) == (best, pytest.approx(curve[best]))
    assert found["steps"] == 12 != best
    stored = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    for key, tensor in heads.state_dict().items():
        assert torch.equal(stored[f"heads.{key}"], tensor)


def test_an_interrupted_run_may_end_where_it_stands(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """It is asked for as many steps as it has taken, and takes no other."""
    for steps, resume in ((6, None), (4, "last")):
        train_heads(
            target,
            make_rows(20),
            config=HeadsConfig(num_heads=2),
            output_dir=tmp_path,
            training_args=quick(tmp_path, steps, save_steps=2, save_total_limit=None),
            resume_from_checkpoint=resume,
        )
        assert measured(tmp_path)["steps"] == steps
        shutil.rmtree(tmp_path / "checkpoint-6", ignore_errors=True)


def test_a_run_without_progress_stops_early_and_stays_stopped(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    def run(patience: int, resume: str | None) -> dict[str, Any]:
        still = quick(tmp_path, 40, save_steps=2, learning_rate=1e-30, save_total_limit=None)
        still.eval_on_start = True  # which a run that goes on had evaluated before
        train_heads(
            target,
            make_rows(20),
            config=HeadsConfig(num_heads=2),
            output_dir=tmp_path,
            training_args=still,
            early_stopping_patience=patience,
            resume_from_checkpoint=resume,
        )
        return measured(tmp_path)

    stopped, again, patient = run(2, None), run(2, "last"), run(4, "last")
    assert {each["best_step"] for each in (stopped, again, patient)} == {2}
    assert (stopped["steps"], patient["steps"]) == (6, 10) and again["steps"] <= 7


def test_a_run_goes_on_exactly_from_best_heads_between_two_checkpoints(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    rows = make_rows(20)

    def run(resume: Path | None = None) -> Any:
        heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
        often: Any = {"eval_steps": 1, "save_steps": 6, "save_total_limit": None}
        args = quick(tmp_path, 6, logging_steps=4, metric_for_best_model="loss", **often)
        more: Any = {"callbacks": [Interruptions()]}
        trainer = HeadsTrainer(heads, target, args, rows, make_rows(4), **more)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        state = trainer.state
        curve = [entry["loss"] for entry in state.log_history if "loss" in entry]
        return curve, state.best_global_step, heads.state_dict()

    curve, best, expected = run()
    for checkpoint in tmp_path.glob("checkpoint-[23456]"):
        shutil.rmtree(checkpoint)
    again, found, heads = run(tmp_path / "checkpoint-1")
    assert (again, found) == (curve, best) and best > 1
    assert all(torch.equal(expected[name], heads[name]) for name in expected)


@pytest.mark.parametrize("killed", with_slow([True], [False]), ids=["twice", "at once"])
def test_a_run_that_goes_on_in_another_folder_knows_its_best_heads(
    killed: bool, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """Also a checkpoint in that folder does, and none of another run is mistaken for them."""

    held_out = make_rows(20, seed=9)

    def run(folder: str, steps: int, resume: str | None = None, seed: int = 0) -> Any:
        heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
        wild: Any = {"learning_rate": 3.0, "metric_for_best_model": "loss", "seed": seed}
        args = quick(tmp_path / folder, steps, save_steps=2, save_total_limit=None, **wild)
        args.lr_scheduler_type = SchedulerType.CONSTANT
        more: Any = {"callbacks": [Interruptions()]}
        trainer = HeadsTrainer(heads, target, args, make_rows(20), held_out, **more)
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        return trainer.state.best_global_step, trainer.state.best_model_checkpoint, heads

    best, place, expected = run("first", 8)
    assert best < 6, "the test needs a best that lies before the checkpoint"
    resume = "first/checkpoint-6"
    if killed:
        run("second", 7, resume)
        resume = "second/checkpoint-7"
    found, where, heads = run("second", 8, resume)
    assert (found, where) == (best, place)
    state = expected.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in heads.state_dict().items())
    run("first", 8, seed=5)
    assert run("second", 10, "second/checkpoint-8")[0] == 10


def test_what_was_best_by_another_measure_is_forgotten(
    target: TargetModel, make_rows: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = tmp_path / "run"

    def run(steps: int, seed: int, resume: str | None = None, **more: Any) -> dict[str, Any]:
        wild: Any = {"save_steps": 1, "learning_rate": 3.0, "save_total_limit": None, **more}
        train_heads(
            target,
            make_rows(20),
            eval_dataset=make_rows(20, seed=seed),
            config=HeadsConfig(num_heads=2),
            output_dir=ended,
            training_args=quick(ended, steps, lr_scheduler_type="constant", **wild),
            resume_from_checkpoint=resume,
        )
        return measured(ended)

    first = run(8, 9)["best_step"]
    assert first < 8
    shutil.copytree(ended, tmp_path / "kept")
    cases: list[tuple[dict[str, Any], int, str | None]] = [
        ({"metric_for_best_model": "loss"}, 9, "by another metric_for_best_model"),
        ({}, 8, "by another held-out text"),
        ({}, 9, None),
    ]
    for changed, held_out, said in cases:
        shutil.rmtree(ended)
        shutil.copytree(tmp_path / "kept", ended)
        caplog.clear()
        finished, further = run(8, held_out, "last", **changed), run(9, held_out, "last", **changed)
        if said is None:
            assert finished["best_step"] == further["best_step"] == first
            assert "is forgotten" not in caplog.text
        else:
            assert (finished["best_step"], further["best_step"]) == (None, 9)
            assert f"the best so far was chosen {said}: it is forgotten" in caplog.text


class Send(TrainerCallback):
    """Sends a signal to this process in the middle of a step."""

    def __init__(self, step: int, which: int = signal.SIGTERM) -> None:
        self.step, self.which = step, which

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            signal.raise_signal(self.which)


class Fail(TrainerCallback):
    """Raises in the middle of a run."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")


def test_a_run_that_fails_hands_sigterm_back(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    args, callbacks = quick(tmp_path, 8), [Interruptions(), Fail()]
    trainer = HeadsTrainer(heads, target, args, make_rows(20), make_rows(4), callbacks=callbacks)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.parametrize(("step", "said"), [(2, False), (6, True)])
def test_who_interrupts_a_run_is_told_how_it_goes_on(
    step: int,
    said: bool,
    target: TargetModel,
    make_rows: Rows,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    args, callbacks = quick(tmp_path, 8, save_steps=4), [Send(step, signal.SIGINT)]
    trainer = HeadsTrainer(heads, target, args, make_rows(20), make_rows(4), callbacks=callbacks)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    sentence = f"is {tmp_path / 'checkpoint-4'}: go on with --resume_from_checkpoint last"
    assert (sentence in caplog.text) == said == ("interrupted" in caplog.text)


OTHERWISE: list[tuple[dict[str, int], int]] = [({"save_steps": 4}, 8), ({}, 5), ({}, 8)]


@pytest.mark.parametrize(
    ("often", "told"),
    [
        ({"save_steps": 4}, 5),
        ({}, 6),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERWISE),
    ],
)
def test_sigterm_ends_with_a_checkpoint_that_goes_on_exactly(
    often: dict[str, Any], told: int, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    rows = make_rows(20)
    handler = signal.getsignal(signal.SIGTERM)

    def run(folder: str, *more: TrainerCallback, resume: Path | None = None) -> Any:
        heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
        args = quick(tmp_path / folder, 8, logging_steps=1, **often)
        callbacks = [Interruptions(), *more]
        trainer = HeadsTrainer(heads, target, args, rows, make_rows(4), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        log = trainer.state.log_history
        curve = [entry[name] for entry in log for name in ("loss", "eval_loss") if name in entry]
        return curve, heads.state_dict()

    expected_curve, expected = run("whole")
    with pytest.raises(SystemExit) as stopped:
        run("told", Send(told), Send(told))  # the second is the same, handed on by a launcher
    assert stopped.value.code == 143
    checkpoint = last_checkpoint(tmp_path / "told")
    assert checkpoint == tmp_path / "told" / f"checkpoint-{told}" and is_whole(checkpoint)
    assert signal.getsignal(signal.SIGTERM) == handler
    # The folder may have been moved meanwhile; the best heads are found all the same.
    (tmp_path / "told").rename(tmp_path / "moved")
    curve, found = run("moved", resume=tmp_path / "moved" / checkpoint.name)
    assert curve == expected_curve
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_full_disk_is_named_and_no_part_of_a_checkpoint_stays(
    target: TargetModel, make_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda state, _, **more: save(state, "/dev/full", **more))
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    trainer = HeadsTrainer(heads, target, quick(tmp_path, 1), make_rows(8), make_rows(4))
    with pytest.raises(OSError, match="checkpoint-1 was not written to its end: ") as full:
        trainer.train()
    assert is_disk_full(full.value) and not list(tmp_path.glob("checkpoint-*"))
