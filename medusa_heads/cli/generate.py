"""`medusa-heads generate CHECKPOINT --prompt TEXT`: text from a target that drafts, streamed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.arguments import parse_arguments, run_command
from medusa_heads.cli.decoding import (
    DecodingArguments,
    decoder_options,
    describe,
    generation_options,
    load_drafted_model,
    load_model,
    load_training_free_model,
    warn_if_lossy,
)

if TYPE_CHECKING:
    from medusa_heads.inference.assisted import AssistedModel


@dataclass
class GenerateArguments(DecodingArguments):
    """What to generate."""

    draft_model: str | None = field(
        default=None,
        metadata={
            "help": "draft with this language model (a hub id or a folder); the checkpoint then "
            "is the target itself"
        },
    )
    prompt: str | None = field(
        default=None, metadata={"help": "text to continue; without it, standard input is read"}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> None:
        (arguments,) = parse_arguments(
            (GenerateArguments,),
            argv,
            prog="medusa-heads generate",
            description=__doc__ or "",
            positional="checkpoint",
        )
        generate(arguments)

    return run_command(work)


def generate(arguments: GenerateArguments) -> None:
    """Stream the continuation to standard output, the statistics to standard error."""
    prompt = sys.stdin.read() if arguments.prompt is None else arguments.prompt
    if not prompt:
        raise ValueError("the prompt is empty: give --prompt TEXT, or text on standard input")
    import torch

    from medusa_heads.cli.streaming import StepStreamer

    model, tokenizer = _load(arguments)
    options = generation_options(arguments, tokenizer)
    warn_if_lossy(model)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    length, limit = inputs["input_ids"].shape[1], model.target.max_positions
    if limit is not None and length + arguments.max_new_tokens > limit:
        raise ValueError(
            f"{length} tokens of prompt and {arguments.max_new_tokens} new ones do not fit the "
            f"target's context of {limit}: shorten the prompt, or lower --max_new_tokens"
        )
    torch.manual_seed(arguments.seed)
    model.generate(
        **inputs.to(model.target.device),
        streamer=StepStreamer(tokenizer, group=arguments.group),
        **options,
    )
    if arguments.stats:
        print(describe(model.last_stats), file=sys.stderr)


def _load(arguments: GenerateArguments) -> tuple[AssistedModel, Any]:
    """The target with what drafts for it: heads, a draft model, or nothing that was trained."""
    from medusa_heads.draft_checkpoint import is_draft

    options = decoder_options(arguments)
    if arguments.drafter is not None:
        if arguments.draft_model is not None:
            raise ValueError("--drafter drafts without a model: leave it or --draft_model out")
        return load_training_free_model(arguments, **options)
    drafted = arguments.draft_model is not None or is_draft(arguments.checkpoint)
    if drafted and arguments.corpus is not None:
        raise ValueError(
            "--corpus is of heads or a --drafter, and here a model drafts: leave one out"
        )
    if arguments.draft_model is not None:
        if arguments.target is not None:
            raise ValueError(
                "with draft_model, the first argument is the target: leave out --target"
            )
        return load_drafted_model(arguments, arguments.draft_model, arguments.checkpoint, **options)
    if drafted:
        return load_drafted_model(arguments, arguments.checkpoint, arguments.target, **options)
    return load_model(arguments, **options)
