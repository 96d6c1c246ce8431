"""The flags and YAML keys of the training run. Light: no torch or transformers is imported."""

import difflib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from medusa_heads.errors import first_line
from medusa_heads.files import expanded
from medusa_heads.settings import above_zero, at_least, coerce, flag, folders, mapping
from medusa_heads.training.arguments.batch import MOST_ROWS, USUAL_STEPS
from medusa_heads.training.arguments.renamed import by_names_here
from medusa_heads.training.arguments.usable import check_trackers, check_usable, check_words

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from medusa_heads.training.arguments.rates import RunArguments

# Fields of OptimisationArguments that transformers.TrainingArguments has not, or means otherwise.
OF_THE_RUN = (
    "resume_from_checkpoint", "overwrite_output_dir", "early_stopping_patience",
    "dry_run", "measure_steps", "training_args",
)  # fmt: skip
_PLAIN = {bool, int, float, NoneType}  # of others transformers takes more than their types say
SHARED_LEARNING_RATE = 5e-3
OWN_LEARNING_RATE = 1e-3


@dataclass
class OptimisationArguments:
    """The training run. Names and meanings are those of transformers.TrainingArguments."""

    output_dir: str = flag("runs/heads", "Folder for the heads and all that belongs to them.")
    learning_rate: float | None = flag(
        None,
        f"Peak learning rate. Default: {SHARED_LEARNING_RATE} with a shared vocabulary "
        f"matrix, {OWN_LEARNING_RATE} with own ones; for targets wider than 384 less in "
        "proportion, and less for a prefix layer, induction, sequential heads and small steps. A "
        "rate given here is every part's, and meant for the batch size given, or 16.",
    )
    num_train_epochs: float = flag(2.0, "Epochs: passes over the training text.")
    max_steps: int = flag(-1, "Optimiser steps, instead of epochs; -1: go by epochs.")
    per_device_train_batch_size: int | None = flag(
        None,
        f"Training batch size of each process, in rows. Default: {MOST_ROWS}; of heads that learn "
        f"from little text at the default rate so few that there are about {USUAL_STEPS:,} steps.",
    )
    per_device_eval_batch_size: int = flag(16, "Evaluation batch size of each process.")
    gradient_accumulation_steps: int = flag(1, "Batches whose gradients make one optimiser step.")
    warmup_share: float = flag(0.05, "Share of the steps in which the learning rate warms up.")
    lr_scheduler_type: str = flag("cosine", "Learning rate schedule, by transformers' names.")
    weight_decay: float = flag(0.0, "AdamW's weight decay.")
    bf16: bool | None = flag(
        None,
        "Compute what is learnt in bf16 autocast. Default: as mixed_precision of accelerate launch "
        "says, or where this machine trains faster so, measured once; not in several processes.",
        nargs="?",
        const=True,
    )
    seed: int = flag(0, "Seed of data order and sampling.")
    logging_steps: float = flag(10, "Steps between two lines of training loss.")
    eval_steps: float | None = flag(
        None, "Steps between two evaluations (below 1: a share). Default: with each checkpoint."
    )
    save_steps: float | None = flag(
        None,
        "Steps between two resumable checkpoints (below 1: a share of the run), beside those of "
        "new best heads. Default: with each evaluation, or once an epoch.",
    )
    save_total_limit: int | None = flag(
        1,
        "Checkpoints kept, the best and the newest among them. With 1, a run that has ended keeps "
        "only the best; resumed, it repeats the steps after that one.",
    )
    load_best_model_at_end: bool = flag(True, "End with the best evaluated heads, not the last.")
    metric_for_best_model: Literal["tokens_per_step_32", "tokens_per_step_16", "loss"] = flag(
        "tokens_per_step_32",
        "What is best: tokens per step on held-out text, simulated with the best tree of so many "
        "nodes, or the loss.",
    )
    early_stopping_patience: int | None = flag(
        None, "Stop after so many evaluations without a new best. Default: never."
    )
    report_to: str = flag("none", "Trackers by transformers' names: none, wandb, tensorboard, ...")
    run_name: str | None = flag(None, "Name of the run at a tracker.")
    resume_from_checkpoint: str | None = flag(
        None,
        "A checkpoint folder; 'last' for the newest in output_dir; 'auto' for the newest, or a "
        "run from the start if there is none.",
    )
    overwrite_output_dir: bool = flag(
        False, "Remove an earlier run's checkpoints, and what it trained, from output_dir."
    )
    dry_run: bool = flag(
        False,
        "Everything but the run: read settings and text, print what would be trained, how long, "
        "and what memory and disk it takes; then stop.",
    )
    measure_steps: bool = flag(
        True,
        "A dry run measures some steps, where the target's weights are on this disk and fit into "
        "the memory.",
    )
    training_args: dict | str | None = flag(
        None,
        "Further fields of transformers.TrainingArguments: a mapping in a configuration file, JSON "
        "on the command line.",
    )

    def __post_init__(self) -> None:
        folders(self, "output_dir")
        self.output_dir = str(expanded(self.output_dir))
        at_least(self, 1, "per_device_train_batch_size", "per_device_eval_batch_size")
        at_least(self, 1, "gradient_accumulation_steps", "save_total_limit")
        at_least(self, 1, "early_stopping_patience")
        at_least(self, 0, "weight_decay")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in [0, 2**32), got {self.seed}")
        # Of these transformers takes 0 for something else: all checkpoints, the other setting, ...
        above_zero(self, "learning_rate", "num_train_epochs")
        above_zero(self, "logging_steps", "eval_steps", "save_steps")
        if self.max_steps <= 0 and self.max_steps != -1:
            raise ValueError(
                f"max_steps must be above 0, got {self.max_steps}: leave it out to count in epochs"
            )
        if self.early_stopping_patience is not None and not self.load_best_model_at_end:
            raise ValueError(
                "early_stopping_patience ends with the best heads: leave load_best_model_at_end on"
            )
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"warmup_share must lie in [0, 1), got {self.warmup_share}")
        mapping(self, "training_args")


def to_training_arguments(
    arguments: OptimisationArguments,
    vocab_matrix: str,
    *,
    rate: float | None = None,
    autocast: Callable[[str | None], bool] = lambda _: False,
) -> "RunArguments":
    """The same run as transformers.TrainingArguments; by default the learning rate is `rate`, or
    goes by the vocab_matrix of heads.

    `autocast` says whether to train in bf16 where `arguments` do not, told the device if that is
    certain. ValueError: see `further_arguments`; or a value is refused.
    """
    import torch
    from transformers import SchedulerType

    from medusa_heads.training.arguments.rates import RunArguments

    if arguments.lr_scheduler_type not in (known := [each.value for each in SchedulerType]):
        raise ValueError(
            f"lr_scheduler_type must be one of {known}, got {arguments.lr_scheduler_type!r}"
        )
    extra = further_arguments(arguments)
    values = {name: value for name, value in asdict(arguments).items() if name not in OF_THE_RUN}
    values["warmup_steps"] = values.pop("warmup_share")
    values["rows_by_text"] = values["per_device_train_batch_size"] is None
    values["per_device_train_batch_size"] = arguments.per_device_train_batch_size or MOST_ROWS
    values["rates_by_width"] = values["learning_rate"] is None
    if values["rates_by_width"]:
        # A shared matrix leaves few parameters to learn with and wants the higher rate (measured).
        usual = SHARED_LEARNING_RATE if vocab_matrix == "shared" else OWN_LEARNING_RATE
        values["learning_rate"] = rate or usual
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if values["bf16"] is None and (extra.get("fp16") or launched != "no"):
        values["bf16"] = launched == "bf16" and not extra.get("fp16")
    elif values["bf16"] is None:
        values["bf16"] = autocast("cpu" if extra.get("use_cpu") else None)
    # Without a word of its own, one follows the other.
    steps = {kind: values.pop(f"{kind}_steps") for kind in ("eval", "save")}
    for kind, other in (("eval", "save"), ("save", "eval")):
        every = steps[kind] or steps[other]
        values[f"{kind}_strategy"] = "steps" if every else "epoch"
        if every:
            values[f"{kind}_steps"] = every
    defaults = {
        "optim": "adamw_torch_fused",
        # bf16 without an accelerator is refused unless the CPU is asked for by name.
        "use_cpu": not torch.accelerator.is_available(),
        "disable_tqdm": False,
        "label_names": ["labels"],
        # Else the order of the rows would hang on whatever touched torch's generator before.
        "data_seed": arguments.seed,
    }
    if "LOCAL_RANK" not in os.environ:
        extra.pop("ddp_backend", None)  # of several processes, which transformers would ask for
    try:
        args = RunArguments(**{**defaults, **values, **extra})
    except TypeError as error:  # of a mapping that is made into what it says
        raise ValueError(f"training_args cannot be used: {first_line(error)}") from error
    if arguments.bf16 is False and launched == "bf16" and not args.fp16:
        args.mixed_precision = "no"  # transformers takes a flag that is off for none
    use_one_gpu(args)
    assert isinstance(args.report_to, list)
    check_trackers(args.report_to)
    check_usable(args)
    return args


def use_one_gpu(args: "TrainingArguments") -> None:
    """Without a launcher transformers would take all GPUs, with a batch for each: its DataParallel
    would copy what learns to every one of them, but not the target."""
    args._n_gpu = min(args.n_gpu, 1)


def further_arguments(arguments: OptimisationArguments) -> dict[str, Any]:
    """What `training_args` say. ValueError: a field is unknown or has a flag, or is a number, a
    switch or one of some words and is given something else."""
    from transformers import TrainingArguments

    known = {f.name for f in fields(TrainingArguments)}
    given = by_names_here(mapping(arguments, "training_args"), known)
    hints = get_type_hints(TrainingArguments) if given else {}
    _check_names(given, known)
    check_words(given, hints, TrainingArguments)
    return {
        name: coerce(value, hints[name], f"training_args: {name}")
        if set(get_args(hints[name]) or (hints[name],)) <= _PLAIN
        else value
        for name, value in given.items()
    }


def _check_names(given: dict[str, Any], known: set[str]) -> None:
    flags = {f.name for f in fields(OptimisationArguments)}
    for name in given:
        if name in flags:
            raise ValueError(f"training_args: {name!r} has a key of its own, set it there")
        if name.startswith(("hub_", "push_to_hub")):
            raise ValueError(
                f"training_args: {name!r} has no place here: heads are pushed with medusa-heads "
                "push, which takes the token from `hf auth login` or HF_TOKEN"
            )
        if name == "deepspeed" and given[name]:  # transformers would want the package first
            raise ValueError(
                "training_args: DeepSpeed would take apart what is trained: leave deepspeed out, "
                "and launch with configs/accelerate/fsdp.yaml, which spreads the target of heads, "
                "or with configs/accelerate/ddp.yaml"
            )
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"training_args: transformers.TrainingArguments has no field {name!r}{hint}"
            )
