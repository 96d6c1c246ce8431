"""train_heads: from text to a checkpoint folder, with the target proved unchanged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import TrainingArguments

from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.contents import DRAFT_FILE, MTP_FILE, SIDECAR_FILE, is_draft, is_heads, is_mtp
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.draft import DraftArguments
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.runs.draft import train_draft
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.heads_trainer import HeadsTrainer

Rows = Callable[..., Dataset]


def quick(folder: Path, steps: int = 20, **changed: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 2e-2,
        "training_args": {"use_cpu": True, "disable_tqdm": True},
    }
    return to_training_arguments(OptimisationArguments(**{**values, **changed}), "shared")


def test_a_folder_with_heads_statistics_and_the_story_of_the_run(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    before = target.weights_digest()
    heads = train_heads(
        target,
        make_rows(40),
        eval_dataset=make_rows(8, seed=7),
        config=HeadsConfig(num_heads=2),
        output_dir=tmp_path / "run",
        training_args=quick(tmp_path / "elsewhere"),
        record={"note": "kept"},
    )
    assert target.weights_digest() == before
    assert not (tmp_path / "elsewhere").exists()
    loaded = load_heads(tmp_path / "run", target)
    assert loaded.statistics is not None and loaded.statistics.positions == 8 * 18
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, loaded.heads.state_dict()[name])
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["steps"] == 20
    assert metrics["eval_head0_top1"] == pytest.approx(loaded.statistics.top_k_accuracy(1)[0])
    run = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert run["training_set"]["rows"] == 40 and run["held_out_set"]["rows"] == 8
    assert run["training_arguments"]["max_steps"] == 20 and run["note"] == "kept"
    assert run["target_weights_sha256"] == before and "argv" not in run and run["versions"]["torch"]


def test_the_targets_matrix_lies_beside_the_heads_only_where_it_is_asked_for(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    for asked in (True, False):  # in the same place
        train_heads(
            target,
            make_rows(4),
            eval_dataset=make_rows(2, seed=7),
            config=HeadsConfig(num_heads=1),
            output_dir=tmp_path / "run",
            training_args=quick(tmp_path, max_steps=1),
            overwrite_output_dir=True,
            with_vocab_matrix=asked,
        )
        assert (tmp_path / "run" / "vocab_matrix.safetensors").exists() == asked
    with pytest.raises(ValueError, match="no engine reads it beside others"):
        train_heads(
            target,
            make_rows(4),
            config=HeadsConfig(num_heads=1, vocab_matrix="own"),
            output_dir=tmp_path / "own",
            training_args=quick(tmp_path, max_steps=1),
            with_vocab_matrix=True,
        )


@pytest.mark.parametrize("file", [SIDECAR_FILE, DRAFT_FILE, MTP_FILE])
def test_what_was_trained_is_overwritten_only_where_that_is_asked_for(
    file: str, make_rows: Rows, tmp_path: Path
) -> None:
    """Of any kind; no target is looked for before."""
    (tmp_path / file).write_text("{}")
    for resume in (None, "auto"):
        with pytest.raises(ValueError, match="already: choose another output_dir, or set overwrit"):
            train_heads(
                "nobody/nothing",
                make_rows(4),
                output_dir=tmp_path,
                training_args=quick(tmp_path),
                resume_from_checkpoint=resume,
            )


def test_a_run_that_overwrites_leaves_nothing_of_another_kind(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """What a folder says it holds would be another run's."""
    output, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    output.mkdir()
    elsewhere.mkdir()
    for name in (DRAFT_FILE, MTP_FILE, "model.safetensors", "generation_config.json", "notes.txt"):
        (output / name).write_text("{}")
    (elsewhere / "adapter_config.json").write_text("{}")
    (output / "adapter").symlink_to(elsewhere)
    given: dict[str, Any] = {"eval_dataset": make_rows(2, seed=7), "output_dir": output}
    given["training_args"] = quick(tmp_path, max_steps=1)
    train_heads(target, make_rows(4), **given, overwrite_output_dir=True)
    assert is_heads(output) and not is_draft(output) and not is_mtp(output)
    assert (output / "notes.txt").exists() and not (output / "model.safetensors").exists()
    given |= {"draft": DraftArguments(), "overwrite_output_dir": True}
    given["training_args"] = quick(tmp_path, max_steps=1, metric_for_best_model="loss")
    train_draft(target, make_rows(4), **given)
    assert is_draft(output) and not is_heads(output)
    assert not (output / "medusa_lm_head.safetensors").exists()
    assert (elsewhere / "adapter_config.json").exists(), "removed behind a link"


@pytest.mark.parametrize(
    "config",
    [
        {"vocab_matrix": "own"},
        pytest.param({"kind": "eagle3", "vocab_matrix": "own"}, marks=pytest.mark.slow),
    ],
    ids=["medusa", "eagle3"],
)
def test_training_makes_heads_better(
    target: TargetModel, make_rows: Rows, tmp_path: Path, config: dict[str, Any]
) -> None:
    losses, rows = [], make_rows(16)
    for steps in (1, 36):
        train_heads(
            target,
            rows,
            eval_dataset=rows,
            config=HeadsConfig(num_heads=3, **config),
            output_dir=tmp_path / str(steps),
            training_args=quick(tmp_path, steps),
        )
        metrics = json.loads((tmp_path / str(steps) / "metrics.json").read_text())
        losses.append(metrics["eval_loss"])
    assert losses[1] < 0.75 * losses[0]


def test_a_share_is_held_out_where_no_eval_set_is_given(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    train_heads(target.model, make_rows(40), output_dir=tmp_path, training_args=quick(tmp_path, 1))
    run = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert (run["training_set"]["rows"], run["held_out_set"]["rows"]) == (38, 2)


def test_transformers_own_arguments_will_do(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path / "unused"),
        max_steps=2,
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        load_best_model_at_end=True,
        metric_for_best_model="tokens_per_step_32",
    )
    train_heads(target, make_rows(20), output_dir=tmp_path / "run", training_args=args)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["steps"] == 2 and metrics["best_step"] in (1, 2)


def test_a_corpus_can_be_given_by_its_path(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    make_rows(20).to_json(tmp_path / "rows.jsonl")
    train_heads(
        target,
        tmp_path / "rows.jsonl",
        eval_dataset=[tmp_path / "rows.jsonl"],
        output_dir=tmp_path / "run",
        training_args=quick(tmp_path, 1),
    )
    story = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert story["training_set"]["rows"] == story["held_out_set"]["rows"] == 20


@pytest.mark.parametrize("given", [None, [{"text": "a"}], 5])
def test_what_is_no_corpus_is_refused(given: Any, target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dataset must be .*, got .*Dataset\.from_list"):
        train_heads(target, given, output_dir=tmp_path / "run")


def test_a_target_that_changes_is_noticed(
    target: TargetModel, make_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = HeadsTrainer.train

    def train_and_touch(self: HeadsTrainer, *args: Any, **kwargs: Any) -> Any:
        outcome = train(self, *args, **kwargs)
        with torch.no_grad():
            next(self.target.model.parameters())[0, 0] += 1
        return outcome

    monkeypatch.setattr(HeadsTrainer, "train", train_and_touch)
    with pytest.raises(RuntimeError, match="target's weights changed"):
        train_heads(target, make_rows(40), output_dir=tmp_path, training_args=quick(tmp_path, 1))
    assert not (tmp_path / "medusa_heads.json").exists()


def test_the_last_checkpoint_is_resumed(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    states = []
    for resume in (None, "last"):
        heads = train_heads(
            target,
            make_rows(40),
            output_dir=tmp_path,
            training_args=quick(tmp_path, 6, save_steps=4),
            resume_from_checkpoint=resume,
        )
        states.append(heads.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    with pytest.raises(ValueError, match="nothing to resume"):
        train_heads(
            target, make_rows(4), output_dir=tmp_path / "new", resume_from_checkpoint="last"
        )


@pytest.mark.parametrize(
    ("changed", "further", "message"),
    [
        ({}, {"early_stopping_patience": 0}, "early_stopping_patience must be at least 1, got 0"),
        (
            {"load_best_model_at_end": False},
            {"early_stopping_patience": 2},
            "early_stopping_patience ends with the best: leave load_best_model_at_end on",
        ),
        (
            {"training_args": {"use_cpu": True, "label_smoothing_factor": 0.1}},
            {},
            "label_smoothing_factor has no place in this training: leave it out, got 0.1",
        ),
        (
            {"training_args": {"use_cpu": True, "parallelism_config": {"tp_size": 2}}},
            {},
            "parallelism_config has no place in this training",
        ),
        (
            {"training_args": {"use_cpu": True, "bf16_full_eval": True}},
            {},
            "bf16_full_eval has no place in this training: leave it out, got True",
        ),
        (
            {"training_args": {"use_cpu": True, "dataloader_drop_last": True}},
            {},
            "dataloader_drop_last leaves no batch: 4 rows do not fill one of 8",
        ),
    ],
)
def test_runs_that_cannot_be_are_refused(
    changed: dict[str, Any],
    further: dict[str, Any],
    message: str,
    target: TargetModel,
    make_rows: Rows,
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=message):
        train_heads(
            target,
            make_rows(4),
            eval_dataset=make_rows(4, seed=1),
            output_dir=tmp_path / "run",
            training_args=quick(tmp_path, 1, **changed),
            **further,
        )
    assert not (tmp_path / "run" / "medusa_heads.json").exists()


def test_the_folder_of_a_run_is_no_file(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match=r"expected a folder at '.*run', found a file"):
        train_heads(target, make_rows(4), output_dir=tmp_path / "run")
