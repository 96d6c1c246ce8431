"""What a run leaves of itself: `run.yaml`, what was run on what with which versions, beside every
checkpoint; and what `metrics.json` holds, in the end."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from medusa_heads.contents import STATE_FILE
from medusa_heads.files import read_json, replace_file
from medusa_heads.masking import masked
from medusa_heads.plain_yaml import parse_yaml
from medusa_heads.training.arguments.batch import StepsBefore

RUN_FILE = "run.yaml"
METRICS_FILE = "metrics.json"
# transformers': flops of another model, and a time that only a run which takes no step measures;
# and what is for trackers.
NOT_KEPT = ("total_flos", "eval_model_preparation_time", "eval_accepted_text")
_DECISIVE = {
    "heads": "heads of another shape",
    "target_weights_sha256": "another target",
    "training_set": "another training set",
    "loss": "another loss",
    "joint": "other settings of joint training",
    "draft": "another draft model, or another way of teaching it",
    "mtp": "other modules, or other depths",
}
_LEARNING = ("heads", "draft", "mtp")  # of which a run has one
# Of transformers' training arguments those that say what was learnt, and how. Not among them, nor
# any that transformers may add: tokens and names at hubs and trackers, folders, addresses.
_TOLD = {
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio",
    "num_train_epochs", "max_steps", "per_device_train_batch_size", "auto_find_batch_size",
    "per_device_eval_batch_size", "gradient_accumulation_steps", "eval_accumulation_steps",
    "average_tokens_across_devices", "max_grad_norm", "label_smoothing_factor", "optim",
    "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "neftune_noise_alpha", "bf16", "fp16", "tf32", "bf16_full_eval",
    "fp16_full_eval", "use_cpu", "full_determinism", "activation_checkpointing",
    "activation_checkpointing_kwargs", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "use_liger_kernel", "use_cache", "torch_compile", "torch_compile_backend",
    "torch_compile_mode", "torch_empty_cache_steps", "logging_strategy", "logging_steps",
    "logging_first_step", "logging_nan_inf_filter", "eval_strategy", "eval_steps", "eval_delay",
    "eval_on_start", "prediction_loss_only", "save_strategy", "save_steps", "save_total_limit",
    "save_only_model", "ignore_data_skip", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "seed", "data_seed", "label_names", "disable_tqdm", "report_to",
    "train_sampling_strategy", "dataloader_drop_last", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "remove_unused_columns", "accelerator_config", "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb", "ddp_backend", "ddp_broadcast_buffers", "ddp_static_graph",
    "ddp_timeout",
}  # fmt: skip


def changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The training arguments that tell of the course and are not transformers' defaults, as plain
    values."""
    changed = {}
    for field in (field for field in fields(args) if field.name in _TOLD and field.init):
        # Not against a TrainingArguments made anew: making one resets accelerate under a run.
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = _as_json(getattr(args, field.name, default))
        if value != _as_json(default):
            changed[field.name] = value
    return changed


def write_run(folder: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write `run.yaml` into a folder that is there; secrets in the record are starred out."""
    replace_file(Path(folder) / RUN_FILE, to_yaml(record))


def to_yaml(content: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(_plain(content), sort_keys=False))


def mean_loss(log: Sequence[Mapping[str, float]]) -> float | None:
    """Mean training loss of a run's steps, also of those before it was interrupted, which
    transformers' own leaves out; None where none was logged."""
    steps, total = 0.0, 0.0
    for entry in log:
        if "loss" in entry:
            total += entry["loss"] * (entry["step"] - steps)
            steps = entry["step"]
    return total / steps if steps else None


def check_same_run(checkpoint: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Refuse to go on from the checkpoint of a run that learnt something else.

    Settings of the course (steps, rates, batch sizes) may differ: transformers warns of those that
    matter. Raises ValueError: it was made for another target, on other text, or what learns or how
    is another; or its story cannot be read."""
    before, now = _told(checkpoint), _plain(record)
    for name, what in _DECISIVE.items():
        told = name in now or name in _LEARNING
        if name in before and told and before[name] != now.get(name):
            raise ValueError(
                f"{str(checkpoint)!r} was made with {what} ({name} differs from its {RUN_FILE}): "
                "resume with the settings it was made with, or start anew"
            )


def judged_by_another(checkpoint: str | os.PathLike[str], record: Mapping[str, Any]) -> str | None:
    """By what other text or metric the best of a checkpoint's run was chosen than is now; None
    where both are the same, or it does not say."""
    before, now = _told(checkpoint), _plain(record)
    if before.get("held_out_set", now.get("held_out_set")) != now.get("held_out_set"):
        return "held-out text"
    metrics = [
        (story.get("training_arguments") or {}).get("metric_for_best_model")
        for story in (before, now)
    ]
    return None if not before or metrics[0] == metrics[1] else "metric_for_best_model"


def steps_before(checkpoint: str | None) -> StepsBefore:
    """How the run that a checkpoint is of, if there is one, made its steps. Raises ValueError: its
    story cannot be read."""
    if checkpoint is None:
        return StepsBefore()
    told = _told(checkpoint)
    loaded, given = (told.get(name) for name in ("target_loaded", "training_arguments"))
    size = read_json(Path(checkpoint) / STATE_FILE).get("train_batch_size")
    processes, accumulated = (
        part.get(name) if isinstance(part, dict) else None
        for part, name in ((loaded, "processes"), (given, "gradient_accumulation_steps"))
    )
    accelerated = given.get("accelerator_config") if isinstance(given, dict) else None
    split = isinstance(accelerated, dict) and accelerated.get("split_batches") is True
    return StepsBefore(_count(size), _count(processes) or 1, _count(accumulated) or 1, split)


def in_bf16_before(checkpoint: str | None) -> bool | None:
    """Whether the run that a checkpoint is of, if there is one, learnt in bf16 autocast; None where
    it does not say. Raises ValueError: its story cannot be read."""
    given = _told(checkpoint).get("training_arguments") if checkpoint is not None else None
    if not isinstance(given, dict):
        return None
    return given.get("bf16") is True  # a record leaves out what is off


def target_dtype_before(checkpoint: str | None) -> str | None:
    """In what dtype the run that a checkpoint is of, if there is one, had its target; None where it
    does not say. Raises ValueError: its story cannot be read."""
    loaded = _told(checkpoint).get("target_loaded") if checkpoint is not None else None
    dtype = loaded.get("dtype") if isinstance(loaded, dict) else None
    return dtype if dtype in ("bfloat16", "float16", "float32") else None


def _count(told: object) -> int | None:
    return told if type(told) is int and told > 0 else None


def _told(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """What lies beside a checkpoint, nothing where there is none. Raises ValueError: it cannot be
    read."""
    file = Path(checkpoint) / RUN_FILE
    if not file.is_file():
        return {}
    try:
        story = parse_yaml(file.read_text(encoding="utf-8"))
        if not isinstance(story, dict):
            raise ValueError("it holds no 'key: value' lines")
    except ValueError as error:
        raise ValueError(
            f"{str(file)!r} is damaged ({error}): resume from another checkpoint"
        ) from error
    return story


def _as_json(value: Any) -> Any:
    def plain(part: Any) -> Any:
        if isinstance(part, AcceleratorConfig):
            return part.to_dict()
        return getattr(part, "value", None) or str(part)

    return json.loads(json.dumps(value, default=plain))


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    # Through JSON: records are plain data, and nothing else should get in.
    return masked(json.loads(json.dumps(content)))
