"""`medusa-heads generate CHECKPOINT --prompt TEXT`: text from a target that drafts, streamed."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from medusa_heads.cli.choices import print_choices
from medusa_heads.cli.decoding import describe, load_drafting_model, warn_if_lossy
from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.flags.decoding import (
    NOT_UTF8,
    DecodingArguments,
    check_encodable,
    generation_options,
)
from medusa_heads.errors import warn
from medusa_heads.settings import flag


@dataclass
class GenerateArguments(DecodingArguments):
    """What to generate."""

    prompt: str | None = flag(None, "Text to continue. Default: standard input.")


def generate(arguments: GenerateArguments) -> None:
    """Stream the continuation to standard output, the statistics to standard error."""
    prompt = _from_standard_input() if arguments.prompt is None else arguments.prompt
    if not prompt:
        raise ValueError("the prompt is empty: give --prompt TEXT, or text on standard input")
    check_encodable(prompt)
    import torch

    from medusa_heads.cli.streaming import StepStreamer
    from medusa_heads.data.encoding import prompt_ids
    from medusa_heads.data.prompts import lacks_template

    model, tokenizer = load_drafting_model(arguments)
    options = generation_options(arguments, tokenizer)
    warn_if_lossy(model)
    if lacks_template(prompt, tokenizer):
        warn(
            "the target continues the prompt as it is, without its chat template: for answers of a "
            "chat model use medusa-heads chat"
        )
    ids_1T = torch.tensor([prompt_ids(tokenizer, prompt)], dtype=torch.long)
    length, new = ids_1T.shape[1], arguments.max_new_tokens
    model.target.check_length(length + new, f"{length} of the prompt, {new} --max_new_tokens")
    torch.manual_seed(arguments.seed)
    model.generate(
        input_ids=ids_1T.to(model.target.device),
        attention_mask=torch.ones_like(ids_1T, device=model.target.device),
        streamer=StepStreamer(tokenizer, group=arguments.group),
        **options,
    )
    print_choices()  # here, because generate() has mistakes of its own to refuse
    if arguments.stats:
        print(describe(model, arguments.draft_model), file=sys.stderr)


def _from_standard_input() -> str:
    """What stands there, without a mark of the byte order; how a system ends its lines is no part
    of the text."""
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{NOT_UTF8} ({error})") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


main = command("medusa-heads generate", generate, __doc__, "checkpoint")
