"""`medusa-heads generate CHECKPOINT --prompt TEXT`: text from a head-augmented target, streamed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.arguments import parse_arguments, run_command

if TYPE_CHECKING:
    from medusa_heads.inference.stats import GenerationStats


@dataclass
class GenerateArguments:
    """What to generate, with the options of transformers' generate() under their own names."""

    checkpoint: str = field(metadata={"help": "heads checkpoint: a folder written by train-heads"})
    prompt: str | None = field(
        default=None, metadata={"help": "text to continue; without it, standard input is read"}
    )
    target: str | None = field(
        default=None,
        metadata={"help": "hub id or path of the target; default: the one the heads name"},
    )
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16"})
    device: str | None = field(default=None, metadata={"help": "such as cpu or cuda"})
    tree: str = field(
        default="auto",
        metadata={"help": "auto, N, static:N, dynamic:N, chain, cartesian:A,B,.. or FILE.json"},
    )
    max_new_tokens: int = field(default=128, metadata={"help": "tokens at most"})
    do_sample: bool = field(
        default=False, metadata={"help": "draw tokens; implied by --temperature, --top_k, --top_p"}
    )
    temperature: float | None = field(default=None, metadata={"help": "of the sampled tokens"})
    top_k: int | None = field(default=None, metadata={"help": "draw from the k likeliest"})
    top_p: float | None = field(default=None, metadata={"help": "draw from this share"})
    repetition_penalty: float | None = field(default=None, metadata={"help": "1.0: none"})
    seed: int = field(default=0, metadata={"help": "of the random draws"})
    stats: bool = field(default=False, metadata={"help": "print counts and times afterwards"})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "run the Python code that the target's repository brings"}
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
    from transformers import AutoTokenizer, TextStreamer, logging
    from transformers.utils.logging import disable_progress_bar

    from medusa_heads.inference.model import MedusaModel

    logging.set_verbosity_error()
    disable_progress_bar()
    options: dict[str, Any] = {
        "dtype": arguments.dtype,
        "device": arguments.device,
        "trust_remote_code": arguments.trust_remote_code,
    }
    model = MedusaModel.from_pretrained(
        arguments.checkpoint, target=arguments.target, tree=arguments.tree, **options
    )
    tokenizer = AutoTokenizer.from_pretrained(
        model.target.name_or_path, trust_remote_code=arguments.trust_remote_code
    )
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    inputs = inputs.to(model.target.device)
    torch.manual_seed(arguments.seed)
    model.generate(
        **inputs,
        max_new_tokens=arguments.max_new_tokens,
        streamer=TextStreamer(tokenizer),
        **sampling_options(arguments),
    )
    if arguments.stats:
        print(describe(model.last_stats), file=sys.stderr)


def sampling_options(arguments: GenerateArguments) -> dict[str, Any]:
    """The options that were given, as generate() names them."""
    chosen = {
        name: getattr(arguments, name)
        for name in ("temperature", "top_k", "top_p", "repetition_penalty")
        if getattr(arguments, name) is not None
    }
    drawn = arguments.do_sample or bool({"temperature", "top_k", "top_p"} & set(chosen))
    return {"do_sample": drawn, **chosen}


def describe(stats: GenerationStats) -> str:
    """One line of counts, one of times."""
    share = {name: seconds / stats.total_seconds for name, seconds in stats.seconds.items()}
    return (
        f"{stats.tokens} tokens in {stats.steps} steps ({stats.tokens_per_step:.2f} tokens per "
        f"step), {stats.tokens / stats.total_seconds:.1f} tokens/s\n"
        "time: " + ", ".join(f"{name} {part:.0%}" for name, part in share.items())
    )
