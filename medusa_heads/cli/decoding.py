"""The model that the flags of decoding ask for, and its numbers in words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.flags.decoding import DecodingArguments, ModelArguments
from medusa_heads.cli.settled import settle
from medusa_heads.files import expanded

if TYPE_CHECKING:
    from medusa_heads.inference.engine.stats import GenerationStats
    from medusa_heads.inference.models.assisted import AssistedModel
    from medusa_heads.inference.models.medusa import MedusaModel
    from medusa_heads.inference.models.training_free import TrainingFreeModel


def load_model(arguments: ModelArguments, **options: Any) -> tuple[MedusaModel, Any]:
    """The model and its tokenizer, without the bars and warnings of loading.

    Args:
        arguments: what to load.
        options: of MedusaModel, such as `tree`.

    Raises:
        ValueError: checkpoint, target or device is unusable.
        OSError: no tokenizer beside the target.
    """
    from medusa_heads.inference.models.medusa import MedusaModel

    options["target"] = arguments.target
    return load_with_tokenizer(
        arguments, MedusaModel.from_pretrained, arguments.checkpoint, options
    )


def load_training_free_model(
    arguments: DecodingArguments, **options: Any
) -> tuple[TrainingFreeModel, Any]:
    """A target that drafts for itself, as `load_model` loads one with heads.

    Args:
        arguments: whose `checkpoint` is the target.
        options: of TrainingFreeModel, such as `drafter`.

    Raises:
        ValueError: target or device is unusable, or something else is to draft as well.
        OSError: no tokenizer beside the target.
    """
    from medusa_heads.contents import is_heads
    from medusa_heads.inference.models.training_free import TrainingFreeModel

    if arguments.target is not None:
        raise ValueError("with --drafter, the first argument is the target: leave out --target")
    if is_heads(expanded(arguments.checkpoint)):
        raise ValueError(
            f"{arguments.checkpoint!r} holds heads, and --drafter drafts without any: give their "
            "target instead, or leave --drafter out"
        )
    load = TrainingFreeModel.from_pretrained
    return load_with_tokenizer(arguments, load, arguments.checkpoint, options)


def load_with_tokenizer(
    arguments: ModelArguments,
    load: Callable[..., Any],
    checkpoint: str | list[str],
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """What `load` makes of the checkpoint and the flags, and the tokenizer of its target."""
    from transformers import logging
    from transformers.utils.logging import disable_progress_bar

    from medusa_heads.machine import find_device
    from medusa_heads.target.loading import load_tokenizer

    logging.set_verbosity_error()
    disable_progress_bar()
    if arguments.device is not None:
        find_device(arguments.device)  # before anything is downloaded
    model = load(
        checkpoint,
        dtype=arguments.dtype,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
        on_choice=settle,
        **options,
    )
    tokenizer = load_tokenizer(
        model.target.name_or_path,
        revision=model.target.revision,
        trust_remote_code=arguments.trust_remote_code,
    )
    return model, tokenizer


def warn_if_lossy(model: AssistedModel) -> None:
    """One line on standard error where the output is not the target's."""
    if model.acceptance != "lossless":
        print(
            f"{model.acceptance} acceptance is lossy: the output is no longer the target's own",
            file=sys.stderr,
        )


def describe(stats: GenerationStats) -> str:
    """One line of counts, one of times."""
    share = {name: seconds / stats.total_seconds for name, seconds in stats.seconds.items()}
    return (
        f"{stats.tokens} tokens in {stats.steps} steps ({stats.tokens_per_step:.2f} tokens per "
        f"step), {stats.tokens / stats.total_seconds:.1f} tokens/s"
        f"{'' if stats.lossless else ', lossy acceptance'}\n"
        "time: " + ", ".join(f"{name} {part:.0%}" for name, part in share.items())
    )
