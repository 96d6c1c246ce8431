"""An analysis on the screen and on disk: tables, `analysis.json`, `analysis.png`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.files import expanded, replace_json
from medusa_heads.inference.bench.plots import speedup_axes, target_name, where_measured
from medusa_heads.pictures import Line, draw_lines, save_picture
from medusa_heads.tables import formatted, on_screen

if TYPE_CHECKING:
    from rich.table import Table

_EXPECTED = "expected speed-up over plain decoding"
_PARTS = {
    "target": "the target's weights",
    "heads": "the heads, as held while decoding",
    "cache_per_token": "keys and values of a token",
    "prefix_per_token": "the same of the heads' own layer",
    "tree_cache": "keys and values of the drafted nodes",
    "tree_logits": "logits of the drafted nodes",
}
# Columns of the tables, and how an entry of the report, in milliseconds, is written in them.
_CHAINS = {
    "length": "{length}",
    "tokens per step": "{tokens_per_step:.2f}",
    "equation 1": "{equation_1:.2f}",
    "draft cost": "{draft_cost:.3f}",
    "step ms": "{step_seconds:.2f}",
    "speed-up": "{speedup:.2f}",
    "theorem 3.8": "{theorem_3_8:.2f}",
}
_TREES = {
    "tree": "{tree}",
    "tokens per step": "{tokens_per_step:.2f}",
    "step ms": "{step_seconds:.2f}",
    "of it drafting": "{drafting_share:.0%}",
    "speed-up": "{speedup:.2f}",
}
_BATCHES = {
    "rows": "{batch_size}",
    "plain step ms": "{plain_step_seconds:.2f}",
    "tree": "{tree}",
    "step ms": "{step_seconds:.2f}",
    "speed-up": "{speedup:.2f}",
}
_AT_MOST = {
    "rows": "{rows}",
    "weights": "{weights:.1f}",
    "keys and values": "{cache:.1f}",
    "working memory": "{working:.1f}",
    "all": "{most:.1f}",
}


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Chains against theory (where a batch of 1 was measured), trees, batches, memory."""
    batches, first = report["batches"], report["batches"][0]
    chains = f"chains of best guesses, batch of 1; mean acceptance {report['acceptance']:.3f}"
    found = (
        [on_screen(chains, formatted(_CHAINS, map(_in_ms, report["chains"])))]
        if "chains" in report
        else []
    )
    title = (
        f"batch of {first['batch_size']}, {report['dtype']}, {report['context']} tokens of context"
    )
    plain = {"tree": "none", "tokens_per_step": 1.0, "speedup": 1.0, "drafting_seconds": 0.0}
    trees = [
        plain | {"step_seconds": first["plain_step_seconds"]},
        *first["chains"],
        *first["trees"],
    ]
    best = trees.index(first["best"])
    found.append(on_screen(title, formatted(_TREES, map(_in_ms, trees)), bold=best))
    best_drafts = [{**batch, **batch["best"]} for batch in batches]
    rows = formatted(_BATCHES, map(_in_ms, best_drafts))
    found.append(on_screen("the best draft by batch size", rows))
    memory: Mapping[str, int] = report["memory"]
    cells = [
        [_PARTS[part], f"{size / 1e6:.3f}", f"{size / memory['target']:.2%}" if size else "-"]
        for part, size in memory.items()
    ]
    title = f"memory, {first['best']['tree']}, {_in_rows(first)}"
    share = "share of the target's weights"
    found.append(on_screen(title, (["what", "MB", "share"], cells), caption=share))
    title = f"memory at most, MB: prompts of {report['context']} tokens, as many new ones"
    at_most = [
        {name: size if name == "rows" else size / 1e6 for name, size in entry.items()}
        for entry in report["memory_at_most"]
    ]
    found.append(on_screen(title, formatted(_AT_MOST, at_most)))
    return found


def _in_ms(entry: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(entry) | {"drafting_share": entry["drafting_seconds"] / entry["step_seconds"]}
    return {
        name: 1e3 * value if name.endswith("seconds") else value for name, value in shown.items()
    }


def _in_rows(batch: Mapping[str, Any]) -> str:
    rows = batch["batch_size"]
    return f"{rows} row{'s' * (rows > 1)}"


def break_even_sentence(report: Mapping[str, Any]) -> str:
    sizes = [batch["batch_size"] for batch in report["batches"]]
    rows: float | None = report["break_even_batch_size"]
    if rows is None:
        upto = f"at every measured size, up to {sizes[-1]}"
    else:
        upto = f"up to about {rows:.1f} rows" if rows else f"at no measured size from {sizes[0]}"
    grown = report["grown_from"]
    real = f" The target was grown from {grown['name_or_path']!r}." if grown else ""
    return f"Drafting pays {upto}, where no row waits for a batch's last one.{real}"


def memory_sentence(report: Mapping[str, Any]) -> str | None:
    """Which batches do not fit the memory that is free now, in words; None where all do."""
    free: int | None = report["memory_free"]
    if free is None:
        return None
    beyond = [
        entry["rows"]
        for entry in report["memory_at_most"]
        if entry["most"] - entry["weights"] > free
    ]
    if not beyond:
        return None
    return (
        f"{beyond[0]} rows of such texts do not fit the {free / 1e9:.1f} GB of memory that are "
        "free beside the weights."
    )


def write_analysis(folder: str | os.PathLike[str], report: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `analysis.json` and `analysis.png`, each beside its place first; return their paths.
    Raises OSError: the folder cannot be written."""
    json_file, png_file = (expanded(folder) / f"analysis.{kind}" for kind in ("json", "png"))
    png_file.parent.mkdir(parents=True, exist_ok=True)
    save_picture(png_file, partial(_draw, report=report), size=(12.8, 4.4))
    # The numbers last: where they are, the picture is too.
    replace_json(json_file, report)
    return json_file, png_file


def _draw(figure: Any, report: Mapping[str, Any]) -> None:
    by_nodes, by_rows = figure.subplots(1, 2)
    _draw_by_nodes(by_nodes, report["batches"][0])
    sizes = {batch["batch_size"]: batch["best"]["speedup"] for batch in report["batches"]}
    speedup_axes(by_rows, "rows decoded together", _EXPECTED)
    by_rows.set_xticks(list(sizes), map(str, sizes))
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
    speedup_axes(axes, "draft tokens of a step (nodes of the tree)", _EXPECTED)
    axes.xaxis.set_major_formatter("{x:.0f}")
    draw_lines(axes, lines, title=f"Speed-up by tree, {_in_rows(batch)}")
