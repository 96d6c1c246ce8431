"""An analysis on the screen and on disk: tables, `analysis.json`, `analysis.png`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.files import replace_file
from medusa_heads.pictures import LIGHT, Line, draw_lines, save_picture

if TYPE_CHECKING:
    from rich.table import Table

JSON_FILE = "analysis.json"
PNG_FILE = "analysis.png"
_PARTS = {
    "target": "the target's weights",
    "heads": "the heads, as held while decoding",
    "cache_per_token": "keys and values of a token",
    "prefix_per_token": "the same of the heads' own layer",
    "tree_cache": "keys and values of the drafted nodes",
    "tree_logits": "logits of the drafted nodes",
}


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Chains against theory (where a batch of 1 was measured), trees, batches, memory."""
    chains = [_chain_table(report)] if "chains" in report else []
    return [*chains, _tree_table(report), _batch_table(report), _memory_table(report)]


def break_even_sentence(report: Mapping[str, Any]) -> str:
    """Up to which batch size drafting pays, in words."""
    sizes = [batch["batch_size"] for batch in report["batches"]]
    rows: float | None = report["break_even_batch_size"]
    if rows is None:
        upto = f"at every measured size, up to {sizes[-1]}"
    else:
        upto = f"up to about {rows:.1f} rows" if rows else f"at no measured size from {sizes[0]}"
    grown = report["grown_from"]
    real = f" The target was grown from {grown['name_or_path']!r}." if grown else ""
    return f"Drafting pays {upto}, where no row waits for a batch's last one.{real}"


def _chain_table(report: Mapping[str, Any]) -> Table:
    table = _table(
        f"chains of best guesses, batch of 1; mean acceptance {report['acceptance']:.3f}",
        *("length", "tokens per step", "equation 1", "draft cost", "step ms", "speed-up"),
        "theorem 3.8",
    )
    for chain in report["chains"]:
        table.add_row(
            str(chain["length"]),
            f"{chain['tokens_per_step']:.2f}",
            f"{chain['equation_1']:.2f}",
            f"{chain['draft_cost']:.3f}",
            f"{1e3 * chain['step_seconds']:.2f}",
            f"{chain['speedup']:.2f}",
            f"{chain['theorem_3_8']:.2f}",
        )
    return table


def _tree_table(report: Mapping[str, Any]) -> Table:
    batch = report["batches"][0]
    context = f"{report['context']} tokens of context"
    title = f"batch of {batch['batch_size']}, {report['dtype']}, {context}"
    table = _table(title, "tree", "tokens per step", "step ms", "of it drafting", "speed-up")
    table.add_row("none", "1.00", f"{1e3 * batch['plain_step_seconds']:.2f}", "0%", "1.00")
    for entry in [*batch["chains"], *batch["trees"]]:
        table.add_row(
            entry["tree"],
            f"{entry['tokens_per_step']:.2f}",
            f"{1e3 * entry['step_seconds']:.2f}",
            f"{entry['drafting_seconds'] / entry['step_seconds']:.0%}",
            f"{entry['speedup']:.2f}",
            style="bold" if entry == batch["best"] else "",
        )
    return table


def _batch_table(report: Mapping[str, Any]) -> Table:
    table = _table(
        "the best draft by batch size",
        *("rows", "plain step ms", "tree", "step ms", "speed-up"),
    )
    for batch in report["batches"]:
        best = batch["best"]
        table.add_row(
            str(batch["batch_size"]),
            f"{1e3 * batch['plain_step_seconds']:.2f}",
            best["tree"],
            f"{1e3 * best['step_seconds']:.2f}",
            f"{best['speedup']:.2f}",
        )
    return table


def _memory_table(report: Mapping[str, Any]) -> Table:
    memory: Mapping[str, int] = report["memory"]
    best = report["batches"][0]["best"]
    rows = report["batches"][0]["batch_size"]
    table = _table(f"memory, {best['tree']}, {rows} row{'s' * (rows > 1)}", "what", "MB", "share")
    for part, value in memory.items():
        share = f"{value / memory['target']:.2%}" if value else "-"
        table.add_row(_PARTS[part], f"{value / 1e6:.3f}", share)
    table.caption = "share of the target's weights"
    return table


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=not place)
    return table


def write_analysis(folder: str | os.PathLike[str], report: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `analysis.json` and `analysis.png`, each beside its place first; return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_picture(path / PNG_FILE, partial(_draw, report=report), size=(12.8, 4.4))
    # The numbers last: where they are, the picture is too.
    replace_file(path / JSON_FILE, json.dumps(report, indent=2) + "\n")
    return path / JSON_FILE, path / PNG_FILE


def _draw(figure: Any, report: Mapping[str, Any]) -> None:
    by_nodes, by_rows = figure.subplots(1, 2)
    _draw_by_nodes(by_nodes, report["batches"][0])
    _draw_by_rows(by_rows, report)
    machine = report["machine"]
    where = machine.get("gpu") or f"{machine['cores']} cores, {machine['cpu']}"
    name = Path(str(report["target"])).name or "target"
    name += " (grown from a smaller model)" if report["grown_from"] else ""
    figure.suptitle(f"{name}, {report['dtype']}, on {where}", fontsize=11)


def _draw_by_nodes(axes: Any, batch: Mapping[str, Any]) -> None:
    """Of the first batch size: what more rows change stands beside it."""
    lines = []
    for kind in ("chain", "static", "dynamic"):
        drafts = [d for d in (*batch["chains"], *batch["trees"]) if d["tree"].startswith(kind)]
        if drafts:
            lines.append(Line(kind, [(draft["nodes"], draft["speedup"]) for draft in drafts]))
    rows = batch["batch_size"]
    axes.axhline(1.0, color=LIGHT.ink, linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("draft tokens of a step (nodes of the tree)")
    axes.set_ylabel("expected speed-up over plain decoding")
    draw_lines(axes, lines, title=f"Speed-up by tree, {rows} row{'s' * (rows > 1)}")


def _draw_by_rows(axes: Any, report: Mapping[str, Any]) -> None:
    rows = [batch["batch_size"] for batch in report["batches"]]
    best = Line("best draft", [(b["batch_size"], b["best"]["speedup"]) for b in report["batches"]])
    axes.axhline(1.0, color=LIGHT.ink, linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(row) for row in rows])
    axes.set_xlabel("rows decoded together")
    axes.set_ylabel("expected speed-up over plain decoding")
    draw_lines(axes, [best], title="Speed-up by batch size")
