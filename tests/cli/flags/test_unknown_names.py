"""What is said of flags and keys that a command does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_heads.cli import train_draft, train_heads
from medusa_heads.cli.verbs import generate
from tests.conftest import Refused

TO_TRAINER = "a field of transformers.TrainingArguments; give it as --training_args"


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--warmup_steps", "100"], '{"warmup_steps": 100}'),
        (["--warmup-steps=100"], '{"warmup_steps": 100}'),
        (["--optim", "adamw_torch"], '{"optim": "adamw_torch"}'),
        (["--fp16"], '{"fp16": true}'),
        (["--fp16", "True", "--seed", "1"], '{"fp16": true}'),
        (["--gradient_checkpointing", "--seed", "1"], '{"gradient_checkpointing": true}'),
        (["--max_grad_norm", "0.5"], '{"max_grad_norm": 0.5}'),
        (["--adam_beta2", "0.95"], '{"adam_beta2": 0.95}'),
    ],
)
def test_fields_of_the_trainer_go_into_training_args(
    flags: list[str], field: str, refused: Refused
) -> None:
    for command in (train_heads, train_draft):
        assert f"{TO_TRAINER} '{field}'" in refused(command.main, flags)


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--lr", "did you mean '--learning_rate'?"),
        ("--batch_size", "did you mean '--per_device_train_batch_size'?"),
        ("--use_peft", "did you mean '--joint'?"),
        ("--warmup_ratio", "did you mean '--warmup_share'?"),
        ("--dataset_name", "did you mean '--dataset'?"),
        ("--revision", "did you mean '--model_revision'?"),
        ("--num_haeds", "did you mean '--num_heads'?"),
        ("--push_to_hub", "push the heads with 'medusa-heads push' when they are trained"),
        ("--hub_model_id", "push the heads with 'medusa-heads push' when they are trained"),
        ("--tp_plan", "did you mean '--tensor_parallel'?"),
        ("--device", "CUDA_VISIBLE_DEVICES"),
        ("--xyzzy", "--help lists the known ones"),
    ],
)
def test_other_names_of_ours(flag: str, hint: str, refused: Refused) -> None:
    said = refused(train_heads.main, [flag, "3"])
    assert hint in said and len(said) < 220


def test_a_command_that_does_not_train_knows_no_training_args(refused: Refused) -> None:
    assert "training_args" not in refused(generate.main, ["runs/heads", "--warmup_steps", "3"])


def test_keys_of_a_file(tmp_path: Path, refused: Refused) -> None:
    file = tmp_path / "run.yaml"
    said = {
        "warmup_steps: 100": "'training_args: {warmup_steps: 100}'",
        "lr: 1e-3": "did you mean 'learning_rate'?",
        "push_to_hub: true": "medusa-heads push",
    }
    for line, hint in said.items():
        file.write_text(line + "\n")
        assert hint in refused(train_heads.main, ["--config", str(file)])
