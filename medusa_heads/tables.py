"""Tables that are read on a screen, or as Markdown on a page. rich is imported for the screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The names of the columns, and the rows below them."""
SPEEDS = {
    "method": "{name}",
    "tokens/s": "{tokens_per_second:.1f}",
    "speed-up": "{speedup:.2f}",
    "tokens per step": "{tokens_per_step:.2f}",
}
"""Columns of a benchmark's table, and how an entry of its report is written in them."""


def formatted(columns: Mapping[str, str], entries: Iterable[Mapping[str, Any]]) -> Rows:
    """Rows of a table whose columns say how an entry is written in them."""
    cells = [[cell.format(**entry) for cell in columns.values()] for entry in entries]
    return list(columns), cells


def on_screen(
    title: str, rows: Rows, *, caption: str = "", bold: int | None = None, narrow: bool = False
) -> Table:
    """A table, numbers to the right; one row may stand out. Where it is narrow, for many columns of
    short numbers, their names are broken and not cut."""
    from rich import box
    from rich.markup import escape  # a category may be called [math], a compiler stand in [/usr]
    from rich.table import Table

    columns, cells = rows
    table = Table(title=escape(title), caption=escape(caption) or None, caption_justify="left")
    for place, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if place else "left", no_wrap=not place)
    if narrow:
        table.box, table.pad_edge = box.SIMPLE, False
        for place, shown in enumerate(table.columns):
            shown.overflow, shown.no_wrap = "fold", False
            shown.width = None if place else max(len(row[0]) for row in cells)
            shown.min_width = shown.width or 4
    for place, row in enumerate(cells):
        table.add_row(*map(escape, row), style="bold" if place == bold else None)
    return table


def in_markdown(rows: Rows, *, texts: int = 1) -> str:
    """A table, numbers to the right, behind so many columns of texts."""
    columns, cells = rows
    lines = [columns, ["---"] * texts + ["---:"] * (len(columns) - texts), *cells]
    written = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in written)
