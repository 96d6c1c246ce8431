"""An analysis on the screen and on disk: tables, `analysis.json`, `analysis.png`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.files import replace_file
from medusa_heads.inference.bench.plots import over_rows, target_name, where_measured
from medusa_heads.inference.bench.report import Rows, rich_table
from medusa_heads.pictures import LIGHT, Line, draw_lines, save_picture

if TYPE_CHECKING:
    from rich.table import Table

_PARTS = {
    "target": "the target's weights",
    "heads": "the heads, as held while decoding",
    "cache_per_token": "keys and values of a token",
    "prefix_per_token": "the same of the heads' own layer",
    "tree_cache": "keys and values of the drafted nodes",
    "tree_logits": "logits of the drafted nodes",
}
# Columns of the tables, and how an entry of the report is written in them.
_CHAINS = {
    "length": "{length}",
    "tokens per step": "{tokens_per_step:.2f}",
    "equation 1": "{equation_1:.2f}",
    "draft cost": "{draft_cost:.3f}",
    "step ms": "{step_ms:.2f}",
    "speed-up": "{speedup:.2f}",
    "theorem 3.8": "{theorem_3_8:.2f}",
}
_TREES = {
    "tree": "{tree}",
    "tokens per step": "{tokens_per_step:.2f}",
    "step ms": "{step_ms:.2f}",
    "of it drafting": "{of_it_drafting:.0%}",
    "speed-up": "{speedup:.2f}",
}
_BATCHES = {
    "rows": "{batch_size}",
    "plain step ms": "{plain_ms:.2f}",
    "tree": "{tree}",
    "step ms": "{step_ms:.2f}",
    "speed-up": "{speedup:.2f}",
}


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Chains against theory (where a batch of 1 was measured), trees, batches, memory."""
    first = report["batches"][0]
    found = []
    if "chains" in report:
        mean = f"mean acceptance {report['acceptance']:.3f}"
        rows = _rows(_CHAINS, report["chains"])
        found.append(rich_table(f"chains of best guesses, batch of 1; {mean}", rows))
    context = f"{report['context']} tokens of context"
    plain = {"tree": "none", "tokens_per_step": 1.0, "speedup": 1.0, "drafting_seconds": 0.0}
    plain["step_seconds"] = first["plain_step_seconds"]
    trees = [plain, *first["chains"], *first["trees"]]
    found.append(
        rich_table(
            f"batch of {first['batch_size']}, {report['dtype']}, {context}",
            _rows(_TREES, trees),
            bold=trees.index(first["best"]),
        )
    )
    best = [
        {
            **batch["best"],
            "batch_size": batch["batch_size"],
            "plain_ms": 1e3 * batch["plain_step_seconds"],
        }
        for batch in report["batches"]
    ]
    found.append(rich_table("the best draft by batch size", _rows(_BATCHES, best)))
    memory: Mapping[str, int] = report["memory"]
    cells = []
    for part, value in memory.items():
        share = f"{value / memory['target']:.2%}" if value else "-"
        cells.append([_PARTS[part], f"{value / 1e6:.3f}", share])
    found.append(
        rich_table(
            f"memory, {first['best']['tree']}, {_in_rows(first)}",
            (["what", "MB", "share"], cells),
            caption="share of the target's weights",
        )
    )
    return found


def _rows(columns: Mapping[str, str], entries: Sequence[Mapping[str, Any]]) -> Rows:
    cells = []
    for entry in entries:
        step, drafting = entry["step_seconds"], entry["drafting_seconds"]
        shown = {**entry, "step_ms": 1e3 * step, "of_it_drafting": drafting / step}
        cells.append([cell.format(**shown) for cell in columns.values()])
    return list(columns), cells


def _in_rows(batch: Mapping[str, Any]) -> str:
    rows = batch["batch_size"]
    return f"{rows} row{'s' * (rows > 1)}"


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


def write_analysis(folder: str | os.PathLike[str], report: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `analysis.json` and `analysis.png`, each beside its place first; return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    json_file, png_file = Path(folder) / "analysis.json", Path(folder) / "analysis.png"
    png_file.parent.mkdir(parents=True, exist_ok=True)
    save_picture(png_file, partial(_draw, report=report), size=(12.8, 4.4))
    # The numbers last: where they are, the picture is too.
    replace_file(json_file, json.dumps(report, indent=2) + "\n")
    return json_file, png_file


def _draw(figure: Any, report: Mapping[str, Any]) -> None:
    by_nodes, by_rows = figure.subplots(1, 2)
    _draw_by_nodes(by_nodes, report["batches"][0])
    sizes = {batch["batch_size"]: batch["best"]["speedup"] for batch in report["batches"]}
    over_rows(by_rows, list(sizes), "expected speed-up over plain decoding")
    draw_lines(by_rows, [Line("best draft", list(sizes.items()))], title="Speed-up by batch size")
    grown = " (grown from a smaller model)" if report["grown_from"] else ""
    where = f"{report['dtype']}, on {where_measured(report['machine'])}"
    figure.suptitle(f"{target_name(report)}{grown}, {where}", fontsize=11)


def _draw_by_nodes(axes: Any, batch: Mapping[str, Any]) -> None:
    """Of the first batch size: what more rows change stands beside it."""
    lines = []
    for kind in ("chain", "static", "dynamic"):
        drafts = [d for d in (*batch["chains"], *batch["trees"]) if d["tree"].startswith(kind)]
        if drafts:
            lines.append(Line(kind, [(draft["nodes"], draft["speedup"]) for draft in drafts]))
    axes.axhline(1.0, color=LIGHT.ink, linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("draft tokens of a step (nodes of the tree)")
    axes.set_ylabel("expected speed-up over plain decoding")
    draw_lines(axes, lines, title=f"Speed-up by tree, {_in_rows(batch)}")
