"""What a checkpoint's heads are expected to gain on this machine, and what they cost.

medusa-heads analyze runs/demo/heads --batch_sizes 1 2 4 8 --report runs/demo/analysis
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_heads.cli.decoding import load_model
from medusa_heads.cli.flags.arguments import parse_arguments, run_command
from medusa_heads.cli.flags.decoding import ModelArguments
from medusa_heads.cli.settled import tell_choices
from medusa_heads.files import check_folder


@dataclass
class AnalyzeArguments(ModelArguments):
    """What to measure, and where to write it."""

    context: int = field(default=256, metadata={"help": "Tokens in the cache while measuring."})
    batch_sizes: list[int] = field(
        default_factory=lambda: [1, 2, 4, 8], metadata={"help": "Sequences decoded together."}
    )
    refresh: bool = field(
        default=False, metadata={"help": "Measure anew, whatever was measured earlier."}
    )
    report: str | None = field(
        default=None, metadata={"help": "Folder for analysis.json and analysis.png."}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> None:
        (arguments,) = parse_arguments(
            (AnalyzeArguments,),
            argv,
            prog="medusa-heads analyze",
            description=__doc__ or "",
            positional="checkpoint",
        )
        analyze(arguments)

    return run_command(work)


def analyze(arguments: AnalyzeArguments) -> dict[str, Any]:
    """Measure, or read what was measured earlier, and show it; returns what analysis.json holds.

    Raises:
        ValueError: checkpoint, target or a setting is unusable.
    """
    if arguments.context < 1 or not arguments.batch_sizes or min(arguments.batch_sizes) < 1:
        raise ValueError("expected a context and batch sizes of at least 1")
    if arguments.report is not None:
        check_folder(arguments.report)
    from rich.console import Console

    # "chain": attaching must not measure already.
    model, _ = load_model(arguments, tree="chain")
    if model.statistics is None:
        raise ValueError(
            f"the heads in {arguments.checkpoint!r} carry no statistics, which say what a draft is "
            "worth: measure them with medusa-heads calibrate"
        )
    from medusa_heads.inference.adapt.measure import SIZES
    from medusa_heads.inference.bench import speedup, speedup_report
    from medusa_heads.inference.bench.speedup import memory_overhead
    from medusa_heads.inference.engine.capability import capability

    limit = model.target.max_positions
    if limit is not None and arguments.context > (most := limit - max(SIZES)):
        raise ValueError(
            f"a context of {arguments.context} and a tree do not fit the target's {limit} "
            f"positions: {most} at most"
        )
    tell_choices()
    console = Console()
    with console.status("measuring"):
        report = speedup.analyze(
            model.target,
            model.drafting,
            model.statistics,
            context=arguments.context,
            batch_sizes=arguments.batch_sizes,
            chain_only=capability(model.target) == "chain",
            refresh=arguments.refresh,
        )
    smallest = report["batches"][0]
    report["memory"] = memory_overhead(
        model.target, model.drafting, smallest["best"]["nodes"], smallest["batch_size"]
    )
    for table in speedup_report.tables(report):
        console.print(table)
    console.print(speedup_report.break_even_sentence(report), soft_wrap=True, highlight=False)
    if arguments.report is not None:
        for path in speedup_report.write_analysis(arguments.report, report):
            console.print(f"Written: {path}", soft_wrap=True, highlight=False)
    return report
