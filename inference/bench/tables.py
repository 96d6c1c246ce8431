"""A benchmark's numbers in rows: for the screen, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
Rows = tuple[list[str], list[list[str]]]  # the columns' names, and the rows below them


def setting_title(setting: Mapping[str, Any], temperature: float | None = None) -> str:
    """For example `bf16, sampled at temperature 0.7, 8 rows`."""
    title = f"{DTYPES.get(setting['dtype'], setting['dtype'])}, {setting['name']}"
    if setting["name"] == "sampled" and temperature is not None:
        title += f" at temperature {temperature:g}"
    rows = setting.get("batch_size", 1)
    return f"{title}, {rows} rows" if rows > 1 else title


def tables(report: Mapping[str, Any]) -> list[Table]:
    """One table a setting, in the report's order, and one of its categories where there are any."""
    found = []
    for setting in report["settings"]:
        title = _whole_title(setting, report)
        found.append(_table(title, speed_rows(setting), remarks(setting)))
        if _categories(setting):
            found.append(_narrow_table("speed-up by category", category_rows(setting)))
    return found


def _whole_title(setting: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    size = f"{setting['prompts']} prompts x {setting['new_tokens']} new tokens, medians"
    return f"{setting_title(setting, report.get('temperature'))}: {size}"


def speed_rows(setting: Mapping[str, Any]) -> Rows:
    """The methods of one setting; the output of the first is what others' is compared with."""
    columns = ["method", "tokens/s", "speed-up", "tokens per step", "output identical"]
    rows = [
        [
            method["name"],
            f"{method['tokens_per_second']:.1f}",
            f"{method['speedup']:.2f}",
            f"{method['tokens_per_step']:.2f}",
            identity_cell(method["identical"], setting["prompts"]) if place else "-",
        ]
        for place, method in enumerate(setting["methods"])
    ]
    return columns, rows


def identity_cell(share: float, prompts: int) -> str:
    """`yes`, or how many of the prompts gave plain decoding's tokens."""
    return "yes" if share == 1.0 else f"{round(share * prompts)} of {prompts}"


def category_rows(setting: Mapping[str, Any]) -> Rows:
    """Speed-ups of every method, a category a row."""
    methods = setting["methods"]
    rows = [
        [category, *(f"{method['by_category'][category]['speedup']:.2f}" for method in methods)]
        for category in _categories(setting)
    ]
    return ["category", *(method["name"] for method in methods)], rows


def _categories(setting: Mapping[str, Any]) -> list[str]:
    return list(setting["methods"][0].get("by_category", {}))


def remarks(setting: Mapping[str, Any]) -> list[str]:
    """What was asked for and did not run, with the reason, and how the table is to be read."""
    lines = [f"{name} left out: {why}" for name, why in setting.get("left_out", {}).items()]
    if setting["name"] == "sampled" and setting.get("batch_size", 1) > 1:
        lines.append("Rows of a batch draw from one stream: the order of steps makes the text.")
    return lines


def _table(title: str, rows: Rows, below: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, caption="\n".join(below) or None, caption_justify="left")
    for place, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if place else "left", no_wrap=not place)
    for row in rows[1]:
        table.add_row(*row)
    return table


def _narrow_table(title: str, rows: Rows) -> Table:
    """Many columns of short numbers: their names are broken, not cut."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for place, column in enumerate(rows[0]):
        width = None if place else max(len(row[0]) for row in rows[1])
        table.add_column(column, justify="right" if place else "left", overflow="fold", width=width)
        table.columns[-1].min_width = width or 4
    for row in rows[1]:
        table.add_row(*row)
    return table


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report as a page."""
    machine = report["machine"]
    where = machine.get("gpu") or f"{machine['cores']} cores, {machine['cpu']}"
    parts = [
        "# Benchmark",
        f"{report['target']} on {where}"
        + (f", torch {machine['torch']}" if "torch" in machine else "")
        + (f", {report['created']}" if "created" in report else ""),
        "Medians over batches; 1.00 is the faster way to decode plainly. Output is compared with "
        "plain decoding's, token for token. Times and memory are those of the whole process.",
    ]
    if report.get("prompts_left_out"):
        parts.append(f"{report['prompts_left_out']} prompts were too long and left out.")
    for setting in report["settings"]:
        parts += [f"## {_whole_title(setting, report)}", _in_markdown(speed_rows(setting))]
        parts.append(_in_markdown(_detail_rows(setting)))
        if drafting := _drafting_rows(setting):
            parts.append(_in_markdown(drafting))
        if _categories(setting):
            parts += ["Speed-up by category:", _in_markdown(category_rows(setting))]
        parts += remarks(setting)
    return "\n\n".join(parts) + "\n"


def _detail_rows(setting: Mapping[str, Any]) -> Rows:
    columns = ["method", "speed-up, quartiles", "first token, ms", "peak memory, MB", "of a run"]
    rows = []
    for method in setting["methods"]:
        low, high = method.get("speedup_quartiles", [method["speedup"]] * 2)
        first = method.get("first_token_seconds")
        memory = [method.get(f"{name}_memory_bytes") for name in ("peak", "run")]
        rows.append(
            [
                method["name"],
                f"{low:.2f} - {high:.2f}",
                "-" if first is None else f"{1e3 * first:.1f}",
                *("-" if value is None else f"{value / 1e6:.1f}" for value in memory),
            ]
        )
    return columns, rows


def _drafting_rows(setting: Mapping[str, Any]) -> Rows | None:
    drafting = [method for method in setting["methods"] if "accepted_by_depth" in method]
    if not drafting:
        return None
    names = list(dict.fromkeys(name for m in drafting for name in m["seconds_by_phase"]))
    rows = []
    for method in drafting:
        phases: Mapping[str, float] = method["seconds_by_phase"]
        whole = sum(phases.values())
        kept = " ".join(f"{share:.2f}" for share in method["accepted_by_depth"][:8])
        parts = [f"{phases.get(name, 0.0) / whole:.0%}" for name in names]
        rows.append([method["name"], str(method.get("nodes", "-")), kept or "-", *parts])
    return ["method", "drafted at most", "steps keeping 1, 2, .. drafts", *names], rows


def _in_markdown(rows: Rows) -> str:
    columns, cells = rows
    lines: Sequence[list[str]] = [columns, ["---", *["---:"] * (len(columns) - 1)], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
