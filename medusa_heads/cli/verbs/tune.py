"""`medusa-heads tune CHECKPOINT`: which tree this machine decodes fastest with, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from medusa_heads.cli.choices import print_choices
from medusa_heads.cli.decoding import load_measured_model
from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.flags.decoding import MeasureArguments
from medusa_heads.files import check_folder, expanded
from medusa_heads.settings import flag
from medusa_heads.tables import on_screen

if TYPE_CHECKING:
    from rich.table import Table

    from medusa_heads.inference.plan.tree_size import TreeSize


@dataclass
class TuneArguments(MeasureArguments):
    """What to measure."""

    context: list[int] = flag([], "Tokens in the cache while measuring. Several give a table each.")
    batch_size: int = flag(1, "Sequences decoded together.")
    write: str | None = flag(
        None, "Write the best static tree, or chain, to this .json, as medusa_choices."
    )


def tune(arguments: TuneArguments) -> None:
    """Measure, or read what was measured earlier, and show every tree considered."""
    if any(context < 1 for context in arguments.context) or arguments.batch_size < 1:
        raise ValueError("expected a context and a batch size of at least 1")
    if arguments.write is not None and len(arguments.context) > 1:
        raise ValueError("--write takes the tree of one context: give one --context")
    written = None if arguments.write is None else expanded(arguments.write)
    if written is not None:
        if not written.parent.is_dir():
            raise ValueError(f"expected a folder at {str(written.parent)!r}, found none")
        check_folder(written.parent)
        if written.is_dir():
            raise ValueError(
                f"expected a file to write at {arguments.write!r}, found a folder: choose another"
            )
    from rich.console import Console

    from medusa_heads.inference.plan import tree_size

    if written is not None and 2 * arguments.batch_size > tree_size.MOST_NODES:
        raise ValueError(
            f"no tree pays for {arguments.batch_size} rows, so that there is none to write: give a "
            "smaller batch_size"
        )
    model, most = load_measured_model(arguments, arguments.context, "tree")
    from medusa_heads.inference.adapt.measure import DEFAULT_CONTEXT
    from medusa_heads.inference.plan.trees import write_choices
    from medusa_heads.machine.measurements import measurement_folder

    assert model.statistics is not None
    print_choices()
    console, kept = Console(), False
    for context in arguments.context or [min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)]:
        with console.status(f"measuring at a context of {context}"):
            sizes = tree_size.tune(
                model.target,
                model.drafting,
                model.statistics,
                context=context,
                batch_size=arguments.batch_size,
                refresh=arguments.refresh,
            )
        dtype = str(model.target.dtype).removeprefix("torch.")
        batch = f", batch of {arguments.batch_size}" if arguments.batch_size > 1 else ""
        console.print(_table(sizes, f"{dtype}, {context} tokens of context{batch}"))
        if beside_others := any(size.beside_others for size in sizes):
            print(tree_size.BESIDE_OTHERS)
        kept |= not beside_others
    if kept:
        print(f"Measurements are kept in {measurement_folder()}")
    if written is not None:
        fixed = [size for size in sizes if size.tree.startswith(("static:", "chain:"))]
        best = max(fixed, key=lambda size: size.tokens_per_second)
        chain = [(0,) * depth for depth in range(1, best.nodes + 1)]
        is_chain = best.tree.startswith("chain:")
        choices = chain if is_chain else model.statistics.choices(best.nodes)
        write_choices(written, choices)
        print(f"{best.tree} written to {written}")


def _table(sizes: Sequence[TreeSize], title: str) -> Table:
    """Every tree in the order given; the fastest stands out."""
    from medusa_heads.inference.plan.tree_size import fastest

    best = sizes.index(fastest(sizes))
    columns = ["tree", "step ms", "tokens per step", "tokens/s", ""]
    cells = [
        [
            size.tree,
            f"{1e3 * size.step_seconds:.2f}",
            f"{size.tokens_per_step:.2f}",
            f"{size.tokens_per_second:.1f}",
            "<- fastest" * (place == best),
        ]
        for place, size in enumerate(sizes)
    ]
    return on_screen(title, (columns, cells), bold=best)


main = command("medusa-heads tune", tune, __doc__, "checkpoint")
