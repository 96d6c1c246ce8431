"""The model that the flags of decoding ask for, and its numbers in words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from medusa_heads.cli.choices import apply_choice
from medusa_heads.cli.flags.decoding import (
    DecodingArguments,
    DraftingArguments,
    ModelArguments,
    decoder_options,
    generation_options,
)
from medusa_heads.contents import is_draft, is_heads, is_mtp
from medusa_heads.files import expanded

if TYPE_CHECKING:
    from medusa_heads.inference.engine.stats import GenerationStats
    from medusa_heads.inference.models.assisted import AssistedModel
    from medusa_heads.inference.models.medusa import MedusaModel


AnyDrafting = TypeVar("AnyDrafting", bound=DraftingArguments)


def load_model(arguments: ModelArguments, **options: Any) -> tuple[MedusaModel, Any]:
    """The target with its heads, and its tokenizer; `options` are those of MedusaModel."""
    from medusa_heads.inference.models.medusa import MedusaModel

    options["target"] = arguments.target
    return _load(arguments, MedusaModel.from_pretrained, arguments.checkpoint, options)


def load_measured_model(
    arguments: ModelArguments, contexts: Sequence[int], worth: str
) -> tuple[MedusaModel, int | None]:
    """The target with heads, whose statistics say the worth of `worth`, for measuring steps in
    these contexts; and the longest that leaves room for a tree, None where nothing limits it."""
    # "chain": attaching must not measure already.
    model, _ = load_model(arguments, tree="chain")
    if model.statistics is None:
        raise ValueError(
            f"the heads in {arguments.checkpoint!r} carry no statistics, which say what a {worth} "
            "is worth: measure them with medusa-heads calibrate"
        )
    from medusa_heads.inference.adapt.step_bench import SIZES

    if (limit := model.target.max_positions) is None:
        return model, None
    most = limit - max(SIZES)
    if beyond := [context for context in contexts if context > most]:
        raise ValueError(
            f"a context of {beyond[0]} and a tree do not fit the target's {limit} positions: "
            f"{most} at most"
        )
    return model, most


def with_own_drafter(arguments: AnyDrafting) -> AnyDrafting:
    """The same arguments; modules that were trained for a target draft as modules do."""
    if arguments.drafter is None and is_mtp(expanded(arguments.checkpoint)):
        return replace(arguments, drafter="mtp")
    return arguments


def load_drafting_model(arguments: DraftingArguments) -> tuple[AssistedModel, Any]:
    """The target with what drafts for it (heads, a draft model or several, or a drafter that was
    not trained), and its tokenizer.
    """
    arguments, modules = with_own_drafter(arguments), is_mtp(expanded(arguments.checkpoint))
    if isinstance(arguments, DecodingArguments):
        generation_options(arguments, None)  # for what it refuses, before seconds of loading
    options, drafts = decoder_options(arguments), arguments.draft_model
    if arguments.drafter is not None:
        from medusa_heads.inference.models.training_free import TrainingFreeModel

        if drafts:
            raise ValueError("--drafter drafts without a model: leave it or --draft_model out")
        if modules and arguments.target is not None:
            options["modules"] = expanded(arguments.checkpoint)
            return _load(arguments, TrainingFreeModel.from_pretrained, arguments.target, options)
        if arguments.target is not None:
            raise ValueError("with --drafter, the first argument is the target: leave out --target")
        if is_heads(expanded(arguments.checkpoint)):
            raise ValueError(
                f"{arguments.checkpoint!r} holds heads, and --drafter drafts without any: give "
                "their target instead, or leave --drafter out"
            )
        return _load(arguments, TrainingFreeModel.from_pretrained, arguments.checkpoint, options)
    if not drafts and not is_draft(arguments.checkpoint):
        return load_model(arguments, **options)
    from medusa_heads.inference.models.drafted import DraftedModel

    del options["deterministic"]
    for name in ("deterministic", "corpus"):
        if getattr(arguments, name):
            raise ValueError(
                f"--{name} is of heads or a --drafter, and here a model drafts: leave one out"
            )
    if drafts and arguments.target is not None:
        raise ValueError("with draft_model, the first argument is the target: leave out --target")
    options["target"] = arguments.checkpoint if drafts else arguments.target
    load: Any = DraftedModel.from_pretrained
    return _load(arguments, load, drafts or arguments.checkpoint, options)


def _load(
    arguments: ModelArguments,
    load: Callable[..., Any],
    checkpoint: str | list[str],
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """What `load` makes of the checkpoint and the flags, without the bars and warnings of loading,
    and the tokenizer of its target."""
    from transformers import logging
    from transformers.utils.logging import disable_progress_bar

    from medusa_heads.machine.devices import find_device
    from medusa_heads.target.loading import load_tokenizer

    logging.set_verbosity_error()
    disable_progress_bar()
    if arguments.device is not None:
        find_device(arguments.device)  # before anything is downloaded
    trusted = arguments.trust_remote_code
    model = load(
        checkpoint,
        dtype=arguments.dtype,
        device=arguments.device,
        trust_remote_code=trusted,
        on_choice=apply_choice,
        **options,
    )
    name, revision = model.target.name_or_path, model.target.revision
    return model, load_tokenizer(name, revision=revision, trust_remote_code=trusted)


def warn_if_lossy(model: AssistedModel) -> None:
    """One line on standard error where the output is not the target's."""
    if not model.lossless:
        print(
            f"{model.acceptance} acceptance is lossy: the output is no longer the target's own",
            file=sys.stderr,
        )


def describe(model: AssistedModel, draft_models: Sequence[str]) -> str:
    """What the last text took: a line of counts, one of times, and of several draft models for how
    many steps each has drafted so far; and of those with another vocabulary how much they share."""
    from medusa_heads.inference.models.drafted import DraftedModel

    stats: GenerationStats = model.last_stats
    share = {name: seconds / stats.total_seconds for name, seconds in stats.seconds.items()}
    lines = [
        f"{stats.tokens} tokens in {stats.steps} steps ({stats.tokens_per_step:.2f} tokens per "
        f"step), {stats.tokens / stats.total_seconds:.1f} tokens/s"
        f"{'' if stats.lossless else ', lossy acceptance'}",
        "time: " + ", ".join(f"{name} {part:.0%}" for name, part in share.items()),
    ]
    if isinstance(model, DraftedModel) and len(draft_models) > 1:
        counts = zip(draft_models, model.draft_steps, strict=True)
        lines.append("steps drafted: " + ", ".join(f"{name} {steps}" for name, steps in counts))
    if isinstance(model, DraftedModel) and min(model.shared_vocabulary) < 1:
        shares = ", ".join(f"{share:.0%}" for share in model.shared_vocabulary)
        lines.append(f"tokens of the target that the draft model has: {shares}")
    return "\n".join(lines)
