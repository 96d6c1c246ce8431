"""Checkpoints: whole or known not to be, and never those of another run."""

import copy
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint

from medusa_heads.config import HeadsConfig
from medusa_heads.contents import DRAFT_FILE, is_draft
from medusa_heads.heads import DraftHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.runs.draft import train_draft
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.training.runs.record import check_same_run
from medusa_heads.training.runs.resumable import (
    checkpoints,
    find_checkpoint,
    find_start,
    is_whole,
    last_checkpoint,
)
from tests.training.runs.test_heads import quick

Rows = Callable[..., Dataset]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[DraftHeads]]:
    """What the first run of most of these tests left, and the heads that it trained."""
    return tmp_path_factory.mktemp("usual") / "run", []


@pytest.fixture
def run(
    target: TargetModel, make_rows: Rows, tmp_path: Path, usual: tuple[Path, list[DraftHeads]]
) -> Callable[..., DraftHeads]:
    """Six steps with a checkpoint after each second; further arguments are train_heads'. One from
    the start without any is made once, and copied where it would be made again."""
    left, made = usual

    def go(
        folder: str = "run", rows: Dataset | None = None, steps: int = 6, **more: Any
    ) -> DraftHeads:
        if (rows, steps, more) == (None, 6, {}) and not (tmp_path / folder).exists():
            if not made:
                made.append(train(left, None, 6))
            shutil.copytree(left, tmp_path / folder)  # with the times of its files
            return copy.deepcopy(made[0])
        return train(tmp_path / folder, rows, steps, **more)

    def train(output: Path, rows: Dataset | None, steps: int, **more: Any) -> DraftHeads:
        settings = {"save_steps": 2, "save_total_limit": None, "load_best_model_at_end": False}
        return train_heads(
            target,
            make_rows(20) if rows is None else rows,
            eval_dataset=make_rows(4, seed=7),
            output_dir=output,
            training_args=quick(tmp_path, steps, **settings),
            **{"config": HeadsConfig(num_heads=2), **more},
        )

    return go


def figures(folder: Path) -> dict[str, Any]:
    """What `metrics.json` says, less how long it took."""
    metrics = json.loads((folder / "metrics.json").read_text())
    return {k: v for k, v in metrics.items() if not k.endswith(("_runtime", "_per_second"))}


def test_a_checkpoint_killed_while_it_is_written_is_passed_over(
    run: Callable[..., DraftHeads], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run().state_dict()
    output = tmp_path / "run"
    newest = output / "checkpoint-6"
    assert last_checkpoint(output) == newest
    state = newest / "trainer_state.json"
    files = sorted(newest.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert files[-1] == state, "what says that a checkpoint is whole must come last"
    state.write_text(state.read_text()[:-40])  # killed in the middle of the last file
    assert get_last_checkpoint(str(output)) == str(newest)  # transformers would take it
    assert find_checkpoint("last", output) == str(output / "checkpoint-4")
    assert "checkpoint-6 was not written to its end" in caplog.text
    with pytest.raises(ValueError, match="expected a whole checkpoint"):
        find_checkpoint(str(newest), output)
    expected = figures(output)
    again = run(resume_from_checkpoint="last").state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert is_whole(newest) and figures(output) == expected


def test_a_finished_run_that_is_resumed_takes_no_further_step(
    run: Callable[..., DraftHeads], make_rows: Rows, tmp_path: Path, caplog: Any
) -> None:
    rows = make_rows(36)  # the sixth step is not the end of an epoch
    whole, expected = run(rows=rows).state_dict(), figures(tmp_path / "run")
    for steps, told in ((6, "at step 6 of 6: nothing"), (4, "is of step 6, and max_steps is 4")):
        again = run(rows=rows, steps=steps, resume_from_checkpoint="last").state_dict()
        assert all(torch.equal(whole[name], again[name]) for name in whole) and told in caplog.text
    assert figures(tmp_path / "run") == expected and expected["train_loss"] > 0


def test_a_finished_run_that_is_asked_for_more_goes_on(
    run: Callable[..., DraftHeads], make_rows: Rows, tmp_path: Path
) -> None:
    for steps, end in ((6, 6), (-1, 10), (12, 12)):  # -1: both passes, of five steps each
        run(rows=make_rows(36), steps=steps, resume_from_checkpoint="auto")
        assert checkpoints(tmp_path / "run")[0].name == f"checkpoint-{end}"


def test_a_checkpoint_that_lacks_any_part_is_not_whole(
    run: Callable[..., DraftHeads], tmp_path: Path
) -> None:
    run()
    whole = tmp_path / "run" / "checkpoint-6"
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        part = shutil.copytree(whole, tmp_path / name)
        (part / name).unlink()
        assert not is_whole(part), name


def test_run_yaml_lies_beside_every_checkpoint(
    run: Callable[..., DraftHeads], tmp_path: Path
) -> None:
    run(record={"note": "kept"})
    final = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    found = checkpoints(tmp_path / "run")
    assert [checkpoint.name for checkpoint in found] == [f"checkpoint-{n}" for n in (6, 4, 2)]
    for checkpoint in found:
        beside = yaml.safe_load((checkpoint / "run.yaml").read_text())
        assert beside | {"created": 0} == final | {"created": 0}
    assert final["note"] == "kept" and len(final["training_set"]["sha256"]) == 64
    assert "argv" not in final and final["versions"]["transformers"]
    assert final["training_arguments"]["save_steps"] == 2
    assert "adam_beta1" not in final["training_arguments"]


def test_a_run_from_the_start_wants_no_leftovers(
    run: Callable[..., DraftHeads], make_rows: Rows, tmp_path: Path
) -> None:
    run()
    (tmp_path / "run" / "checkpoint-8").mkdir()
    with pytest.raises(ValueError, match=r"holds checkpoints of an earlier run \(checkpoint-8\)"):
        run()
    with pytest.raises(ValueError, match="65 tokens, more than the target's context"):
        run(rows=make_rows(20, length=65), overwrite_output_dir=True)
    assert (tmp_path / "run" / "checkpoint-8").exists(), "removed before anything takes its place"
    run(overwrite_output_dir=True)
    assert not (tmp_path / "run" / "checkpoint-8").exists()
    assert find_checkpoint("auto", tmp_path / "elsewhere") is None


def test_a_run_goes_on_in_no_folder_of_another_run(
    run: Callable[..., DraftHeads], tmp_path: Path
) -> None:
    run("first"), run("second")
    other = tmp_path / "second"
    before, told = {p: p.stat() for p in other.rglob("*")}, str(tmp_path / "first/checkpoint-4")
    with pytest.raises(ValueError, match="second' holds checkpoints of an earlier run"):
        run("second", resume_from_checkpoint=told)
    assert all(path.stat().st_mtime_ns == stat.st_mtime_ns for path, stat in before.items())
    run("second", resume_from_checkpoint=told, overwrite_output_dir=True)
    assert [checkpoint.name for checkpoint in checkpoints(other)] == ["checkpoint-6"]
    shutil.rmtree(other / "checkpoint-6")
    with pytest.raises(ValueError, match="second' holds heads already"):
        run("second", resume_from_checkpoint=told)


def test_auto_begins_anew_where_the_first_checkpoint_was_not_written_to_its_end(
    run: Callable[..., DraftHeads], tmp_path: Path
) -> None:
    run()
    for checkpoint in checkpoints(tmp_path / "run"):
        (checkpoint / "trainer_state.json").unlink()
    run(resume_from_checkpoint="auto")
    assert all(is_whole(checkpoint) for checkpoint in checkpoints(tmp_path / "run"))


def test_another_run_is_not_resumed(run: Callable[..., DraftHeads], make_rows: Rows) -> None:
    run()
    with pytest.raises(ValueError, match="was made with another training set"):
        run(rows=make_rows(20, seed=5), resume_from_checkpoint="last")
    with pytest.raises(ValueError, match="was made with heads of another shape"):
        run(config=HeadsConfig(num_heads=3), resume_from_checkpoint="last")
    with pytest.raises(ValueError, match="was made with another loss"):
        run(objective=LossConfig({"forward_kl": 1.0}), resume_from_checkpoint="last")


def test_a_run_of_another_command_is_not_resumed(
    run: Callable[..., DraftHeads], tmp_path: Path
) -> None:
    run()
    checkpoint = tmp_path / "run" / "checkpoint-6"
    with pytest.raises(ValueError, match="was made with heads of another shape"):
        check_same_run(checkpoint, {"mtp": {"mtp": True}})
    for name, what in (("mtp", "other modules"), ("draft", "another draft model")):
        (checkpoint / "run.yaml").write_text(f"{name}: {{depth: 2}}")
        with pytest.raises(ValueError, match=f"was made with {what}"):
            run(resume_from_checkpoint="last")


def test_a_story_that_cannot_be_read_is_named(
    run: Callable[..., DraftHeads], tmp_path: Path
) -> None:
    run()
    story = tmp_path / "run" / "checkpoint-6" / "run.yaml"
    for damaged in ("heads: [", "- heads", "a: !!bool maybe", "[" * 800):
        story.write_text(damaged)
        with pytest.raises(ValueError, match=r"(?s)run.yaml' is damaged .*another checkpoint"):
            run(resume_from_checkpoint="last")


@pytest.mark.parametrize("train", [train_heads, train_draft])
@pytest.mark.parametrize("more", [{}, {"overwrite_output_dir": True}], ids=["plain", "overwrite"])
def test_a_run_writes_over_no_model(
    train: Callable[..., Any],
    more: dict[str, bool],
    target: TargetModel,
    make_rows: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However its folder is spelt, and whether it is the target's or another model's."""
    model = tmp_path / "model"
    target.model.save_pretrained(model)
    (tmp_path / "link").symlink_to(model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    monkeypatch.chdir(tmp_path)
    for output in (model, "model", "link", "./link/../model/"):
        for name, said in ((str(model), "the target .* would write over it"), ("x/y", "no run of")):
            with pytest.raises(ValueError, match=f"{said}.*: choose another output_dir"):
                train(name, make_rows(4), output_dir=output, **more)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_no_target_is_removed_with_the_checkpoints_that_it_is_one_of(tmp_path: Path) -> None:
    """Nor a draft model of this package that is the target now."""
    target = tmp_path / "checkpoint-500"
    target.mkdir()
    (tmp_path / DRAFT_FILE).touch()
    for name, resume in ((target, "auto"), (target, None), (tmp_path, None)):
        with pytest.raises(ValueError, match=r"the target .* would write over it"):
            find_start(tmp_path, resume, str(name), overwrite=True)
    new = tmp_path / "new"  # which a target of the hub may be called
    assert find_start(new, None, str(new), overwrite=False) is None


def test_a_draft_run_that_was_killed_in_its_last_save_goes_on(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """The model's files are in their places, and what vouches for them is not."""
    told: dict[str, Any] = {"metric_for_best_model": "loss", "max_steps": 1, "save_steps": 1}
    given: dict[str, Any] = {"output_dir": tmp_path, "training_args": quick(tmp_path, **told)}
    train_draft(target, make_rows(4), eval_dataset=make_rows(2, seed=7), **given)
    (tmp_path / DRAFT_FILE).unlink()
    given |= {"training_args": quick(tmp_path, **told), "resume_from_checkpoint": "last"}
    train_draft(target, make_rows(4), eval_dataset=make_rows(2, seed=7), **given)
    assert is_draft(tmp_path)
    given |= {"training_args": quick(tmp_path, **told), "overwrite_output_dir": True}
    given["resume_from_checkpoint"] = None
    train_draft(target, make_rows(4), eval_dataset=make_rows(2, seed=7), **given)
    assert is_draft(tmp_path)


def test_a_run_that_begins_anew_in_smaller_batches_hands_sigterm_back(
    target: TargetModel, make_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, sizes = HeadsTrainer.training_step, []

    def crowded(trainer: HeadsTrainer, model: Any, inputs: Any, *more: Any) -> Any:
        sizes.append(len(inputs["labels"]))
        if sizes[-1] == 8:
            raise RuntimeError("CUDA out of memory.")
        return step(trainer, model, inputs, *more)

    monkeypatch.setattr(HeadsTrainer, "training_step", crowded)
    handler = signal.getsignal(signal.SIGTERM)
    args = quick(tmp_path, 2, training_args={"use_cpu": True, "auto_find_batch_size": True})
    train_heads(target, make_rows(20), output_dir=tmp_path, training_args=args)
    assert sizes[0] == 8 and 0 < sizes[-1] < 8
    assert signal.getsignal(signal.SIGTERM) == handler


def test_no_other_checkpoints_are_written_on_sigterm(tmp_path: Path) -> None:
    """transformers' own handler would stay behind the run, and swallow the next SIGTERM."""
    args = quick(tmp_path, training_args={"use_cpu": True, "enable_jit_checkpoint": True})
    with pytest.raises(ValueError, match="enable_jit_checkpoint has no place in this training"):
        HeadsTrainer.check_arguments(args)
