"""What a checkpoint's heads are expected to gain on this machine, and what they cost.

medusa-heads analyze runs/demo/heads --batch_sizes 1 2 4 8 --report runs/demo/analysis
"""

from __future__ import annotations

from dataclasses import dataclass

from medusa_heads.cli.choices import print_choices
from medusa_heads.cli.decoding import load_measured_model
from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.flags.decoding import MeasureArguments
from medusa_heads.files import check_folder
from medusa_heads.settings import flag


@dataclass
class AnalyzeArguments(MeasureArguments):
    """What to measure, and where to write it."""

    context: int = flag(256, "Tokens in the cache while measuring.")
    batch_sizes: list[int] = flag([1, 2, 4, 8], "Sequences decoded together.")
    report: str | None = flag(None, "Folder for analysis.json and analysis.png.")


def analyze(arguments: AnalyzeArguments) -> None:
    """Measure, or read what was measured earlier, and show it."""
    if arguments.context < 1 or not arguments.batch_sizes or min(arguments.batch_sizes) < 1:
        raise ValueError("expected a context and batch sizes of at least 1")
    if arguments.report is not None:
        check_folder(arguments.report)
    from rich.console import Console

    model, _ = load_measured_model(arguments, [arguments.context], "draft")
    from medusa_heads.inference.bench import speedup, speedup_report
    from medusa_heads.inference.bench.memory import Memory
    from medusa_heads.inference.bench.speedup import memory_overhead
    from medusa_heads.inference.engine.capability import capability
    from medusa_heads.inference.plan.tree_size import BESIDE_OTHERS
    from medusa_heads.machine.devices import free_memory

    assert model.statistics is not None
    print_choices()
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
        model.use_tree(smallest["best"]["tree"])
        foretold = Memory(model)
    report["memory_at_most"] = [
        foretold.describe(batch["batch_size"], arguments.context, arguments.context)
        for batch in report["batches"]
    ]
    report["memory_free"] = free_memory(model.target.device)
    console.print(*speedup_report.tables(report))
    if report["beside_others"]:
        print(BESIDE_OTHERS)
    print(speedup_report.break_even_sentence(report))
    if too_much := speedup_report.memory_sentence(report):
        print(too_much)
    if arguments.report is not None:
        for path in speedup_report.write_analysis(arguments.report, report):
            print(f"Written: {path}")


main = command("medusa-heads analyze", analyze, __doc__, "checkpoint")
