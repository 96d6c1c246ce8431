"""Training arguments that no run can use, refused before it: transformers would take them, and end
in a fault, or do without them, when training begins, perhaps hours later. Light, as `training.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import Field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, get_args

from medusa_heads.errors import first_line
from medusa_heads.settings import one_of

if TYPE_CHECKING:
    from transformers import TrainingArguments

_STEPS_OF_A_LONG_RUN = 1_000_000


def check_words(given: Mapping[str, Any], hints: Mapping[str, Any], known: type) -> None:
    """Raises ValueError: a field of `known` is given a word that is none of its own."""
    told: dict[str, Field[Any]] = {each.name: each for each in fields(known)}
    for name, value in given.items():
        kinds = get_args(hints[name]) or (hints[name],)
        enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
        words = [each.value for each in enums[0]] if enums else told[name].metadata.get("choices")
        if words and isinstance(value, str) and value not in words:
            raise ValueError(f"training_args: {name} must be one of {[*words]}, got {value!r}")


def check_usable(args: TrainingArguments) -> None:
    """Raises ValueError: a field, or some together, cannot be used; or no run can train here."""
    from transformers.training_args import trainer_log_levels

    _check_torch()
    for name in ("eval_accumulation_steps", "dataloader_prefetch_factor"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"training_args: {name} must be at least 1, got {value}")
    for name in ("log_level", "log_level_replica"):
        one_of(args, name, [*trainer_log_levels])
    if args.fp16 and args.device.type == "cpu":
        raise ValueError(
            "training_args: fp16 would change nothing on a CPU, on which this run computes: leave "
            "it out, or set bf16"
        )
    _check_loader(args)
    _check_schedule(args)
    _check_packages(args)
    _check_optimiser(args)
    _check_compiler(args)


def _check_torch() -> None:
    import torch.distributed

    if not torch.distributed.is_available():  # accelerate looks for parts of matrices by it
        raise ValueError(
            "this torch was built without torch.distributed, and nothing can be trained with it: "
            "install a build that has it, as those of PyPI do"
        )


def _check_loader(args: TrainingArguments) -> None:
    from torch.utils.data import DataLoader

    names = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context")
    given: Any = {name: getattr(args, f"dataloader_{name}", None) for name in names}
    nothing: Any = [0]
    try:
        DataLoader(nothing, **given)
    except ValueError as error:
        raise ValueError(f"training_args: dataloader_*: {first_line(error)}") from error


def _check_schedule(args: TrainingArguments) -> None:
    import torch
    from transformers import SchedulerType, get_scheduler

    kind = SchedulerType(args.lr_scheduler_type).value
    options: Any = args.lr_scheduler_kwargs or {}
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    try:
        get_scheduler(kind, optimiser, 0, _STEPS_OF_A_LONG_RUN, options)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ValueError(
            f"lr_scheduler_type {kind} cannot be used with lr_scheduler_kwargs {options} "
            f"({first_line(error)}): set what it takes in training_args"
        ) from error


def _check_packages(args: TrainingArguments) -> None:
    from transformers.utils import is_liger_kernel_available

    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ValueError(
            "training_args: use_liger_kernel needs a package that is not installed: "
            "pip install liger-kernel"
        )


def _check_optimiser(args: TrainingArguments) -> None:
    """Look for what the optimiser needs, and make one of a number."""
    import torch
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    name, said = OptimizerNames(args.optim).value, args.optim_args
    parts = (said or "").replace(" ", "").split(",") if said else []
    if any(len(part.split("=")) != 2 for part in parts):
        raise ValueError(
            f"training_args: optim_args must be written as 'name=value,name=value', got {said!r}"
        )
    bare = copy.copy(args)
    bare.optim_args = None
    try:
        plain = Trainer.get_optimizer_cls_and_kwargs(bare)
    except (ImportError, TypeError) as error:
        raise _unusable(f"optim {name}", error) from error
    except ValueError:
        return  # some need the model, and are asked for again with it
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    except (AttributeError, TypeError, ValueError) as error:
        raise _unusable(f"optim_args {said!r}", error) from error
    if said and (kind, options) == plain:
        raise ValueError(
            f"training_args: optim_args {said!r} would change nothing about optim {name}: leave it "
            "out"
        )
    made_of = options.keys() & {"params", "model", "optimizer_dict"}
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and not made_of:
        try:
            kind([torch.nn.Parameter(torch.zeros(1))], **options)
        except (TypeError, ValueError) as error:
            raise _unusable(f"optim {name}", error) from error


def _check_compiler(args: TrainingArguments) -> None:
    """Name a compiler as it will be named."""
    if not args.torch_compile:
        return
    import torch
    from accelerate.utils import TorchDynamoPlugin

    told: Any = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    try:
        TorchDynamoPlugin(**told)
        torch.compile(torch.nn.Identity(), **told)
    except (RuntimeError, ValueError) as error:
        said = " and ".join(f"torch_compile_{name} {value!r}" for name, value in told.items())
        raise _unusable(said, error) from error


def _unusable(what: str, error: Exception) -> ValueError:
    return ValueError(f"training_args: {what} cannot be used: {first_line(error)}")


def check_trackers(names: list[str]) -> None:
    """Make each tracker once. Raises ValueError: one needs something else."""
    from transformers.integrations import get_reporting_integration_callbacks

    for name in names:
        try:
            for tracker in get_reporting_integration_callbacks([name]):
                tracker()
        except (ImportError, RuntimeError, ValueError) as error:
            if name in ("tensorboard", "wandb"):  # which this package can be installed with
                raise ValueError(
                    f"report_to {name} needs a package that is not installed: pip install {name}"
                ) from error
            raise ValueError(f"report_to {name} cannot be used: {error}") from error
