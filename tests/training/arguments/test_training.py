"""Flags of training, and how they become transformers' TrainingArguments."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import SchedulerType

from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.draft import DraftArguments
from medusa_heads.training.arguments.renamed import CHECKPOINTING, by_names_here
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.arguments.training import (
    OptimisationArguments,
    further_arguments,
    to_training_arguments,
)
from medusa_heads.training.runs.heads import train_heads


def test_the_run_is_what_the_flags_say(tmp_path: Path) -> None:
    given = OptimisationArguments(
        output_dir=str(tmp_path),
        bf16=True,
        seed=5,
        warmup_share=0.1,
        eval_steps=0.25,
        report_to="none",
        training_args={"max_grad_norm": 0.5},
    )
    args = to_training_arguments(given, "shared")
    assert (args.learning_rate, args.lr_scheduler_type, args.weight_decay) == (5e-3, "cosine", 0)
    assert (args.warmup_steps, args.max_grad_norm, args.optim) == (0.1, 0.5, "adamw_torch_fused")
    assert (args.seed, args.data_seed, args.bf16, args.disable_tqdm) == (5, 5, True, False)
    assert (args.eval_strategy, args.eval_steps, args.save_strategy) == ("steps", 0.25, "steps")
    assert args.save_steps == 0.25  # the best heads are evaluated and saved
    assert args.report_to == []


def test_gpus_that_are_there_do_not_make_batches_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """One learns, unless a launcher starts a process for each."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    given = OptimisationArguments(training_args={"use_cpu": False})
    args = to_training_arguments(given, "shared")
    assert (args.train_batch_size, args.eval_batch_size) == (16, 16)


def test_own_matrices_learn_at_a_lower_rate_unless_one_is_given(tmp_path: Path) -> None:
    given = OptimisationArguments(output_dir=str(tmp_path))
    assert to_training_arguments(given, "own").learning_rate == 1e-3
    given.learning_rate = 3e-4
    assert to_training_arguments(given, "own").learning_rate == 3e-4


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_grad_nrom": 1}, "no field 'max_grad_nrom'; did you mean 'max_grad_norm'"),
        ({"learning_rate": 1}, "'learning_rate' has a key of its own"),
        ('{"max_grad_norm"', "must be a JSON object"),
        ("[1]", "must map names to values"),
        ({"max_grad_norm": "x"}, "training_args: max_grad_norm must be of type float, got 'x'"),
        ({"max_grad_norm": None}, "max_grad_norm must be of type float, got None"),
        ({"data_seed": 1.5}, "training_args: data_seed must be of type int, got 1.5"),
        ({"use_cpu": "yes"}, "training_args: use_cpu must be of type bool, got 'yes'"),
        ('{"dataloader_num_workers": true}', "must be of type int, got True"),
    ],
)
def test_further_training_arguments_are_checked_by_name_and_type(extra: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_training_arguments(OptimisationArguments(training_args=extra), "shared")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"optim": "muon"}, "training_args: optim must be one of .*'sgd'.*, got 'muon'"),
        ({"save_strategy": "often"}, "save_strategy must be one of .*'epoch'.*, got 'often'"),
        ({"train_sampling_strategy": "bylength"}, "train_sampling_strategy must be one of "),
        ({"log_level": "loud"}, "log_level must be one of .*'passive'.*, got 'loud'"),
        ({"optim_args": "momentum"}, "optim_args must be written as 'name=value,name=value'"),
        ({"optim_args": "amsgrad=True"}, "would change nothing about optim adamw_torch_fused"),
        ({"optim": "sgd", "optim_args": "momentum=x"}, "'momentum=x' cannot be used: could not"),
        ({"optim": "sgd", "optim_args": "momentum=-1"}, "optim sgd cannot be used: Invalid mom"),
        ({"adam_beta1": 1.5}, "optim adamw_torch_fused cannot be used: Invalid beta parameter"),
        ({"eval_accumulation_steps": 0}, "eval_accumulation_steps must be at least 1, got 0"),
        (
            {"dataloader_prefetch_factor": 0, "dataloader_num_workers": 1},
            "dataloader_prefetch_factor must be at least 1, got 0",
        ),
        ({"dataloader_persistent_workers": True}, "dataloader_.*: persistent_workers option needs"),
        ({"accelerator_config": {"batches": 1}}, "training_args cannot be used: .*'batches'"),
        ({"fp16": True}, "training_args: fp16 would change nothing on a CPU"),
        ({"torch_compile_backend": "ofen"}, "torch_compile_backend 'ofen' and .* cannot be used"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_would_be_dropped_or_fail_in_the_run_is_refused_before(
    extra: dict[str, Any], message: str
) -> None:
    given = OptimisationArguments(bf16=False, training_args={"use_cpu": True, **extra})
    with pytest.raises(ValueError, match=message):
        to_training_arguments(given, "shared")


def test_a_run_takes_the_arguments_of_transformers_alone(
    target: TargetModel, make_rows: Callable[..., Dataset], tmp_path: Path
) -> None:
    given: Any = OptimisationArguments()
    with pytest.raises(ValueError, match=r"must be transformers.TrainingArguments .*, got Optimis"):
        train_heads(target, make_rows(4), output_dir=tmp_path, training_args=given)


def test_of_one_process_no_backend_of_several_is_asked_for() -> None:
    extra = {"use_cpu": True, "ddp_backend": "gloo"}
    args = to_training_arguments(OptimisationArguments(training_args=extra), "shared")
    assert args.world_size == 1


@pytest.mark.parametrize(("said", "computed"), [(None, "bf16"), (True, "bf16"), (False, "no")])
def test_a_launch_names_the_precision_unless_a_flag_does(
    said: bool | None, computed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    given = OptimisationArguments(bf16=said, training_args={"use_cpu": True})
    args = to_training_arguments(given, "shared")
    assert (args.bf16, args.mixed_precision) == (said is not False, computed)


def test_further_training_arguments_are_read_as_flags_are() -> None:
    """YAML takes 1e-4 for a word."""
    extra = {"adam_epsilon": "1e-4", "max_grad_norm": 1, "tf32": None, "optim_args": "a=1"}
    given = OptimisationArguments(training_args=extra)
    assert further_arguments(given) == extra | {"adam_epsilon": 1e-4, "max_grad_norm": 1.0}
    assert further_arguments(OptimisationArguments()) == {}


@pytest.mark.parametrize("name", CHECKPOINTING)
def test_a_renamed_field_is_set_under_either_name(name: str) -> None:
    """By the newest that transformers has, of which it does not warn."""
    given: Any = {name: True, f"{name}_kwargs": {"use_reentrant": False}, "use_cpu": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        args = to_training_arguments(OptimisationArguments(training_args=given), "shared")
    assert any(getattr(args, each, False) for each in CHECKPOINTING)
    said = [getattr(args, f"{each}_kwargs", None) for each in CHECKPOINTING]
    assert {"use_reentrant": False} in said


@pytest.mark.parametrize("known", [CHECKPOINTING, CHECKPOINTING[:1], CHECKPOINTING[1:]])
def test_of_two_names_the_newer_counts(known: tuple[str, ...]) -> None:
    newer, older = CHECKPOINTING
    given = {older: True, "seed": 1, newer: False}
    assert by_names_here(given, known) == {"seed": 1, known[0]: False}
    assert by_names_here({older: True}, ()) == {older: True}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", "report_to wandbb cannot be used: wandbb is not supported, only azure_ml, "),
        ("clearml", "report_to clearml cannot be used: .*pip install clearml"),
    ],
)
def test_trackers_that_cannot_be_used_are_named_before_the_run(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_training_arguments(OptimisationArguments(report_to=name), "shared")


def test_a_schedule_that_there_is_not_is_named_by_its_flag() -> None:
    with pytest.raises(ValueError, match=r"lr_scheduler_type must be one of .*, got 'x'"):
        to_training_arguments(OptimisationArguments(lr_scheduler_type="x"), "shared")


@pytest.mark.parametrize(
    ("schedule", "extra", "message"),
    [
        ("warmup_stable_decay", {}, r"with lr_scheduler_kwargs \{\} .*'num_decay_steps'"),
        ("cosine_with_min_lr", {}, "lr_scheduler_type cosine_with_min_lr cannot be used .*min_lr"),
        ("cosine", {"lr_scheduler_kwargs": {"x": 1}}, "cosine cannot be used .* argument 'x'"),
        ("linear", {"lr_scheduler_kwargs": [1]}, "linear cannot be used with .* .1. .*a mapping"),
        ("cosine", {"lr_scheduler_kwargs": {"last_epoch": 3}}, "cannot be used .*initial_lr"),
        ("cosine", {"optim": "lomo"}, "training_args: optim lomo cannot be used: .*lomo-optim"),
        ("cosine", {"use_liger_kernel": True}, "use_liger_kernel needs .*pip install liger-kernel"),
        (
            "cosine",
            {"deepspeed": "x.json"},
            "training_args: DeepSpeed would .* leave deepspeed out",
        ),
    ],
)
def test_what_cannot_be_made_is_told_before_the_run(
    schedule: str, extra: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lomo", "liger_kernel"):
        for module in ("transformers.utils", "transformers.trainer_optimizer"):
            monkeypatch.setattr(f"{module}.is_{name}_available", lambda: False, raising=False)
    given = OptimisationArguments(lr_scheduler_type=schedule, training_args=extra)
    with pytest.raises(ValueError, match=message):
        to_training_arguments(given, "shared")


@pytest.mark.parametrize("kind", [each.value for each in SchedulerType])
def test_every_schedule_can_be_had(kind: str, tmp_path: Path) -> None:
    needed: dict[str, Any] = {
        "warmup_stable_decay": {"num_decay_steps": 5},
        "cosine_with_min_lr": {"min_lr": 0.0},
        "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    }
    extra = {"lr_scheduler_kwargs": needed[kind]} if kind in needed else {}
    given = OptimisationArguments(
        output_dir=str(tmp_path), lr_scheduler_type=kind, bf16=False, training_args=extra
    )
    assert to_training_arguments(given, "shared").lr_scheduler_type == kind


def test_optimisers_that_need_the_model_are_left_to_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformers.trainer_optimizer.is_lomo_available", lambda: True)
    given = OptimisationArguments(bf16=False, training_args={"optim": "adalomo"})
    assert to_training_arguments(given, "shared").optim == "adalomo"


def test_flags_make_a_heads_config() -> None:
    flags = ["--num_heads", "3", "--num_layers", "2", "--vocab_matrix", "own"]
    given = parse_arguments((HeadsConfig,), flags, prog="x", description="")
    assert given == (HeadsConfig(num_heads=3, num_layers=2, vocab_matrix="own"),)
    with pytest.raises(ValueError, match="unknown argument '--hidden_size'"):
        parse_arguments((HeadsConfig,), ["--hidden_size", "8"], prog="x", description="")


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (TargetArguments, {"model_name_or_path": "x", "dtype": "half"}, "dtype must be one of"),
        (HeadsConfig, {"num_heads": 0}, "num_heads must be at least 1, got 0"),
        (OptimisationArguments, {"output_dir": ""}, "output_dir is empty: name a folder"),
        (OptimisationArguments, {"gradient_accumulation_steps": 0}, "must be at least 1"),
        (OptimisationArguments, {"logging_steps": float("-inf")}, "logging_steps must be above 0"),
        (OptimisationArguments, {"weight_decay": float("nan")}, "weight_decay must be at least 0"),
        (OptimisationArguments, {"seed": -1}, r"seed must lie in .0, 2..32., got -1"),
        (OptimisationArguments, {"seed": 2**32}, "seed must lie in .*, got 4294967296"),
        (OptimisationArguments, {"warmup_share": 1.0}, "warmup_share must lie in"),
        (OptimisationArguments, {"learning_rate": 0.0}, "learning_rate must be above 0"),
        (OptimisationArguments, {"learning_rate": float("nan")}, "learning_rate must be above 0"),
        (OptimisationArguments, {"weight_decay": -0.1}, "weight_decay must be at least 0"),
        (OptimisationArguments, {"num_train_epochs": 0}, "num_train_epochs must be above 0, got 0"),
        (OptimisationArguments, {"max_steps": 0}, "max_steps must be above 0, got 0"),
        (OptimisationArguments, {"max_steps": -2}, "leave it out to count in epochs"),
        (OptimisationArguments, {"eval_steps": 0.0}, "eval_steps must be above 0"),
        (OptimisationArguments, {"save_steps": -1.0}, "save_steps must be above 0"),
        (OptimisationArguments, {"save_total_limit": 0}, "save_total_limit must be at least 1"),
        (DraftArguments, {"on_policy_temperature": float("inf")}, "on_policy_temperature must be"),
        (
            DraftArguments,
            {"divergence": "cross_entropy", "distillation_temperature": 2.0},
            "a temperature changes only terms with the target's own distribution",
        ),
    ],
)
def test_values_out_of_range(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_a_checkpoint_goes_on_in_no_schedule_of_another_form(
    target: TargetModel, make_rows: Callable[..., Dataset], tmp_path: Path
) -> None:
    def go(folder: str, course: str, resume: str | None = None) -> None:
        given = OptimisationArguments(
            max_steps=2,
            save_steps=1,
            save_total_limit=2,
            lr_scheduler_type=course,
            training_args={"use_cpu": True, "disable_tqdm": True},
        )
        train_heads(
            target,
            make_rows(12),
            eval_dataset=make_rows(2),
            config=HeadsConfig(num_heads=1),
            output_dir=tmp_path / folder,
            training_args=to_training_arguments(given, "shared"),
            resume_from_checkpoint=resume,
        )

    go("first", "reduce_lr_on_plateau")
    kept = torch.load(tmp_path / "first" / "checkpoint-1" / "scheduler.pt")
    assert kept["mode"] == "max", "more tokens per step are better"
    with pytest.raises(ValueError, match="it was made with another lr_scheduler_type"):
        go("then", "cosine", str(tmp_path / "first" / "checkpoint-1"))
