"""The command `medusa-heads benchmark`.

medusa-heads benchmark runs/demo/heads --num-prompts 20 --report runs/demo
medusa-heads benchmark runs/qwen --prompts questions.jsonl --dtypes bfloat16
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_heads.cli.arguments import parse_arguments, run_command
from medusa_heads.cli.decoding import check_device

PROG = "medusa-heads benchmark"
DTYPES = ("bfloat16", "float32")


@dataclass
class BenchmarkArguments:
    """What to measure, on which prompts."""

    checkpoint: str = field(
        metadata={
            "help": "Heads checkpoint, a folder or user/name[@revision] on a hub; the flag's name "
            "may be left out."
        }
    )
    target: str | None = field(
        default=None,
        metadata={"help": "Hub id or path of the target; by default the one the heads name."},
    )
    prompts: str | None = field(
        default=None,
        metadata={
            "help": "Prompts, .jsonl (key prompt or text) or one a line; by default windows of the "
            "standard library packages that no training here has seen."
        },
    )
    num_prompts: int = field(default=20, metadata={"help": "Prompts to measure on."})
    prompt_length: int = field(
        default=64, metadata={"help": "Tokens in each of the default prompts."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens after each prompt."})
    temperature: float = field(default=0.7, metadata={"help": "Of the sampled settings."})
    # train-heads draws the text it measures heads on with seed 0: other prompts than those.
    seed: int = field(default=1, metadata={"help": "Of the default prompts and the sampling."})
    tree: str = field(
        default="auto",
        metadata={
            "help": "auto, N, static:N, dynamic:N, none, chain, cartesian:A,B,.., FILE.json, one "
            "of them +suffix, or suffix."
        },
    )
    dtypes: list[str] = field(
        default_factory=lambda: list(DTYPES),
        metadata={
            "help": "bfloat16 (all methods, for speed) and float32 (plain and heads, to prove the "
            "output the same)."
        },
    )
    device: str | None = field(default=None, metadata={"help": "For example cuda; default CPU."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the Python code that the target's repository brings."}
    )
    threads: int | None = field(
        default=None,
        metadata={"help": "CPU threads; by default as many as plain decoding is fastest with."},
    )
    report: str | None = field(
        default=None, metadata={"help": "Folder for report.json and report.png."}
    )


def main(argv: Sequence[str]) -> int:
    """Measure as the flags say; returns the exit code."""
    return run_command(lambda: _parse_and_run(argv), prog=PROG)


def _parse_and_run(argv: Sequence[str]) -> None:
    (arguments,) = parse_arguments(
        (BenchmarkArguments,),
        argv,
        prog=PROG,
        description="Measure a heads checkpoint against transformers' own decoding.",
        positional="checkpoint",
    )
    run_benchmark(arguments)


def run_benchmark(arguments: BenchmarkArguments) -> dict[str, Any]:
    """Measure, show the tables, write the report; returns what `report.json` holds.

    Raises:
        ValueError: a setting, a file, the checkpoint or its target is unusable.
    """
    if arguments.threads is not None and arguments.threads < 1:
        raise ValueError(f"threads must be at least 1, got {arguments.threads}")
    if unknown := [dtype for dtype in arguments.dtypes if dtype not in DTYPES]:
        raise ValueError(f"expected dtypes among {', '.join(DTYPES)}, got {unknown[0]!r}")
    from medusa_heads.hub.pull import find_checkpoint
    from medusa_heads.stored_heads import read_sidecar

    folder = find_checkpoint(arguments.checkpoint)
    sidecar = read_sidecar(folder)
    check_device(arguments.device)

    from rich.console import Console

    from medusa_heads.inference.benchmark import DEFAULT_SETTINGS, benchmark
    from medusa_heads.inference.report import tables, write_report
    from medusa_heads.statistics import HeadStatistics

    report = benchmark(
        arguments.checkpoint,
        _prompts(arguments, folder),
        target=arguments.target,
        settings=[s for d in arguments.dtypes for s in DEFAULT_SETTINGS if s.dtype == d],
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        tree=arguments.tree,
        device=arguments.device,
        threads=arguments.threads,
        trust_remote_code=arguments.trust_remote_code,
    )
    console = Console()
    for table in tables(report):
        console.print(table)
    if arguments.report is not None:
        stored = sidecar.get("statistics")
        statistics = HeadStatistics.from_dict(stored) if stored else None
        for path in write_report(arguments.report, report, statistics):
            console.print(f"Written: {path}", soft_wrap=True, highlight=False)
    return report


def _prompts(arguments: BenchmarkArguments, checkpoint: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    from medusa_heads.hub.names import split_revision
    from medusa_heads.inference.named_target import named_target
    from medusa_heads.inference.prompts import encode_prompts, held_out_prompts, read_prompts

    # The file first: a misspelt name is told before anything is loaded.
    texts = read_prompts(arguments.prompts) if arguments.prompts is not None else None
    given = arguments.target
    name, revision = named_target(checkpoint) if given is None else split_revision(given)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision or "main", trust_remote_code=arguments.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"expected a tokenizer beside the target {name!r}: {reason}") from error
    if texts is not None:
        return encode_prompts(texts, tokenizer, num_prompts=arguments.num_prompts)
    return held_out_prompts(
        tokenizer,
        num_prompts=arguments.num_prompts,
        prompt_length=arguments.prompt_length,
        seed=arguments.seed,
    )
