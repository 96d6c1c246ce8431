"""A benchmark's results: tables on the screen, and `report.json`, `report.md`, `report.png`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.files import expanded, replace_file, replace_json
from medusa_heads.inference.bench.methods import STREAM
from medusa_heads.inference.bench.plots import DTYPES, draw, setting_title, where_measured
from medusa_heads.tables import SPEEDS, Rows, formatted, in_markdown, on_screen
from medusa_heads.trees.statistics import HeadStatistics

if TYPE_CHECKING:
    from rich.table import Table

JSON_FILE, MARKDOWN_FILE, PNG_FILE = "report.json", "report.md", "report.png"
_SPEEDS = {**SPEEDS, "output identical": "{same}"}


def tables(report: Mapping[str, Any]) -> list[Table]:
    """One table a setting, in the report's order, and one of its categories where there are any."""
    found = []
    for setting in report["settings"]:
        title, below = _whole_title(setting, report), "\n".join(_remarks(setting))
        found.append(on_screen(title, _speed_rows(setting), caption=below))
        if rows := _category_rows(setting):
            found.append(on_screen("speed-up by category", rows, narrow=True))
    return found


def _whole_title(setting: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    size = f"{setting['prompts']} prompts x {setting['new_tokens']} new tokens, medians"
    return f"{setting_title(setting, report.get('temperature'))}: {size}"


def _speed_rows(setting: Mapping[str, Any]) -> Rows:
    """The methods of one setting; the output of the first is what others' is compared with."""
    plain, *others = setting["methods"]
    prompts = setting["prompts"]
    rest = [method | {"same": identity_cell(method["identical"], prompts)} for method in others]
    return formatted(_SPEEDS, [plain | {"same": "-"}, *rest])


def identity_cell(share: float, prompts: int) -> str:
    """`yes`, or how many of the prompts gave plain decoding's tokens."""
    return "yes" if share == 1.0 else f"{round(share * prompts)} of {prompts}"


def _category_rows(setting: Mapping[str, Any]) -> Rows | None:
    methods = setting["methods"]
    rows = [
        [category, *(f"{method['by_category'][category]['speedup']:.2f}" for method in methods)]
        for category in methods[0].get("by_category", ())
    ]
    return (["category", *(method["name"] for method in methods)], rows) if rows else None


def _remarks(setting: Mapping[str, Any]) -> list[str]:
    """What was asked for and did not run, with the reason, and how the table is to be read."""
    lines = [f"{name} left out: {why}" for name, why in setting.get("left_out", {}).items()]
    if setting["dtype"] != "float32" and _some_text_differs(setting):
        lines.append(
            f"In {DTYPES.get(setting['dtype'], setting['dtype'])} forwards of several tokens round "
            "differently from those of one: at near ties texts go on differently. In fp32 they do "
            "not."
        )
    if setting["name"] != "sampled":
        return lines
    drafting = [method["name"] for method in setting["methods"] if "accepted_by_depth" in method]
    if any(STREAM not in name for name in drafting):
        lines.append(
            "Drafts know what draws here, which is not plain decoding's random stream: other texts "
            f"of the same law. NAME{STREAM} draws from that stream."
        )
    if setting.get("batch_size", 1) > 1:
        lines.append("Rows of a batch share that stream: the order of steps makes the text.")
    return lines


def _some_text_differs(setting: Mapping[str, Any]) -> bool:
    """From plain decoding's, though it is drawn as that is."""
    alike = [method for method in setting["methods"] if setting["name"] != "sampled"]
    if setting.get("batch_size", 1) == 1:
        alike += [method for method in setting["methods"] if STREAM in method["name"]]
    return any(method["identical"] < 1.0 for method in alike)


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report as a page."""
    machine = report["machine"]
    parts = [
        "# Benchmark",
        f"{report['target']} on {where_measured(machine)}"
        + (f", torch {machine['torch']}" if "torch" in machine else "")
        + (f", {report['created']}" if "created" in report else ""),
        "Medians over batches; 1.00 is the faster way to decode plainly. Output is compared with "
        "plain decoding's, token for token. Times and memory are those of the whole process.",
    ]
    if report.get("prompts_left_out"):
        parts.append(f"{report['prompts_left_out']} prompts were too long and left out.")
    for setting in report["settings"]:
        parts += [f"## {_whole_title(setting, report)}", in_markdown(_speed_rows(setting))]
        parts.append(in_markdown(_detail_rows(setting)))
        if drafting := _drafting_rows(setting):
            parts.append(in_markdown(drafting))
        if by_category := _category_rows(setting):
            parts += ["Speed-up by category:", in_markdown(by_category)]
        parts += _remarks(setting)
    return "\n\n".join(parts) + "\n"


def _detail_rows(setting: Mapping[str, Any]) -> Rows:
    columns = ["method", "speed-up, quartiles", "first token, ms", "peak memory, MB", "of a run"]
    shown = {"first_token_seconds": 1e3, "peak_memory_bytes": 1e-6, "run_memory_bytes": 1e-6}
    rows = []
    for method in setting["methods"]:
        low, high = method.get("speedup_quartiles", [method["speedup"]] * 2)
        figures = [f"{method[n] * scale:.1f}" if n in method else "-" for n, scale in shown.items()]
        rows.append([method["name"], f"{low:.2f} - {high:.2f}", *figures])
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


def write_report(
    folder: str | os.PathLike[str],
    report: Mapping[str, Any],
    statistics: HeadStatistics | None = None,
) -> tuple[Path, Path, Path]:
    """Write what `benchmark` returned as three files, each beside its place first, and return their
    paths; the heads' statistics are drawn beside. Raises OSError: the folder cannot be written."""
    png_file = expanded(folder) / PNG_FILE
    png_file.parent.mkdir(parents=True, exist_ok=True)
    draw(report, statistics, png_file)
    # The numbers last: where they are, the rest is too.
    return (*_write_numbers(png_file.parent, report), png_file)


def write_numbers(folder: str | os.PathLike[str], report: Mapping[str, Any]) -> tuple[Path, Path]:
    """The report without its picture, which needs matplotlib; one of other numbers goes. Returns
    the two paths. Raises OSError: the folder cannot be written."""
    path = expanded(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / PNG_FILE).unlink(missing_ok=True)
    return _write_numbers(path, report)


def _write_numbers(path: Path, report: Mapping[str, Any]) -> tuple[Path, Path]:
    json_file, markdown_file = path / JSON_FILE, path / MARKDOWN_FILE
    replace_file(markdown_file, markdown(report))
    replace_json(json_file, report)
    return json_file, markdown_file
