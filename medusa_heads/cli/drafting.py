"""What drafts, by the flags: heads, a draft model or several, or something that was not trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medusa_heads.cli.decoding import load_model, load_training_free_model, load_with_tokenizer
from medusa_heads.cli.flags.decoding import DecodingArguments, decoder_options

if TYPE_CHECKING:
    from medusa_heads.inference.models.assisted import AssistedModel


def load_drafting_model(arguments: DecodingArguments) -> tuple[AssistedModel, Any]:
    """The target with what drafts for it, and its tokenizer.

    Raises:
        ValueError: something of it is unusable, or two things are to draft.
        OSError: no tokenizer beside the target.
    """
    from medusa_heads.contents import is_draft
    from medusa_heads.inference.models.drafted import DraftedModel

    options, drafts = decoder_options(arguments), arguments.draft_model
    if arguments.drafter is not None:
        if drafts:
            raise ValueError("--drafter drafts without a model: leave it or --draft_model out")
        return load_training_free_model(arguments, **options)
    if not drafts and not is_draft(arguments.checkpoint):
        return load_model(arguments, **options)
    if options.pop("deterministic"):
        raise ValueError(
            "--deterministic is of heads or a --drafter, and here a model drafts: leave one out"
        )
    if arguments.corpus is not None:
        raise ValueError(
            "--corpus is of heads or a --drafter, and here a model drafts: leave one out"
        )
    if drafts and arguments.target is not None:
        raise ValueError("with draft_model, the first argument is the target: leave out --target")
    options["target"] = arguments.checkpoint if drafts else arguments.target
    load: Any = DraftedModel.from_pretrained
    return load_with_tokenizer(arguments, load, drafts or arguments.checkpoint, options)


def describe_drafts(model: AssistedModel, names: list[str]) -> str:
    """One line: for how many steps each of several draft models has drafted so far; else nothing.

    Args:
        model: that drafts.
        names: of the draft models, as they were given.
    """
    from medusa_heads.inference.models.drafted import DraftedModel

    if not isinstance(model, DraftedModel) or len(names) < 2:
        return ""
    counts = zip(names, model.draft_steps, strict=True)
    return "steps drafted: " + ", ".join(f"{name} {steps}" for name, steps in counts)
