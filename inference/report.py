"""A benchmark's results on the screen and on disk: tables, `report.json`, `report.png`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.files import replace_file
from medusa_heads.statistics import HeadStatistics

if TYPE_CHECKING:
    from rich.table import Table

JSON_FILE = "report.json"
PNG_FILE = "report.png"
# Okabe and Ito's palette: told apart with every kind of colour vision, and in grey.
COLOURS = ("#7f7f7f", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def setting_title(setting: Mapping[str, Any], temperature: float | None = None) -> str:
    """For example `bf16, sampled at temperature 0.7`."""
    dtype = DTYPES.get(setting["dtype"], setting["dtype"])
    if setting["name"] == "sampled" and temperature is not None:
        return f"{dtype}, sampled at temperature {temperature:g}"
    return f"{dtype}, {setting['name']}"


def tables(report: Mapping[str, Any]) -> list[Table]:
    """One table a setting, in the report's order."""
    return [setting_table(setting, report.get("temperature")) for setting in report["settings"]]


def setting_table(setting: Mapping[str, Any], temperature: float | None = None) -> Table:
    """The methods of one setting; the first is what the others are compared with."""
    from rich.table import Table

    size = f"{setting['prompts']} prompts x {setting['new_tokens']} new tokens, medians"
    table = Table(title=f"{setting_title(setting, temperature)}: {size}")
    table.add_column("method", no_wrap=True)
    for column in ("tokens/s", "speed-up", "tokens per step", "output identical"):
        table.add_column(column, justify="right")
    for index, method in enumerate(setting["methods"]):
        table.add_row(
            method["name"],
            f"{method['tokens_per_second']:.1f}",
            f"{method['speedup']:.2f}",
            f"{method['tokens_per_step']:.2f}",
            identity_cell(method["identical"], setting["prompts"]) if index else "-",
        )
    return table


def identity_cell(share: float, prompts: int) -> str:
    """`yes`, or how many of the prompts gave plain decoding's tokens."""
    return "yes" if share == 1.0 else f"{round(share * prompts)} of {prompts}"


def write_report(
    folder: str | os.PathLike[str],
    report: Mapping[str, Any],
    statistics: HeadStatistics | None = None,
) -> tuple[Path, Path]:
    """Write `report.json` and `report.png`, each beside its place first; return their paths."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    json_file, png_file = path / JSON_FILE, path / PNG_FILE
    staged = path / f".{PNG_FILE}.{os.getpid()}.png"
    try:
        _draw(report, statistics, staged)
        os.replace(staged, png_file)
    finally:
        staged.unlink(missing_ok=True)
    # The numbers last: where they are, the picture is too.
    replace_file(json_file, json.dumps(report, indent=2) + "\n")
    return json_file, png_file


def _draw(report: Mapping[str, Any], statistics: HeadStatistics | None, file: Path) -> None:
    from matplotlib.figure import Figure  # drawn without a display: no pyplot

    figure = Figure(figsize=(12 if statistics else 7, 4.8), layout="constrained")
    panels = figure.subplots(1, 2 if statistics else 1, squeeze=False)[0]
    _draw_speedups(panels[0], report)
    if statistics is not None:
        _draw_accuracy(panels[1], statistics)
    name = Path(str(report["target"])).name or "target"
    machine = report["machine"]
    where = machine.get("gpu") or f"{machine['cores']} cores, {machine['cpu']}"
    figure.suptitle(f"{name} on {where}", fontsize=11)
    figure.savefig(file, dpi=150)


def _draw_speedups(axes: Any, report: Mapping[str, Any]) -> None:
    settings: Sequence[Mapping[str, Any]] = report["settings"]
    names = list(dict.fromkeys(m["name"] for s in settings for m in s["methods"]))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        found = [(x, m) for x, s in enumerate(settings) for m in s["methods"] if m["name"] == name]
        lefts = [x + (place - (len(names) - 1) / 2) * width for x, _ in found]
        heights = [method["speedup"] for _, method in found]
        low_high = [
            method.get("speedup_quartiles", [h, h])
            for (_, method), h in zip(found, heights, strict=True)
        ]
        errors = [
            [max(h - low, 0.0) for h, (low, _) in zip(heights, low_high, strict=True)],
            [max(high - h, 0.0) for h, (_, high) in zip(heights, low_high, strict=True)],
        ]
        colour = COLOURS[place % len(COLOURS)]
        axes.bar(lefts, heights, width, label=name, color=colour, yerr=errors, capsize=3)
        for left, height, high in zip(lefts, heights, errors[1], strict=True):
            axes.annotate(
                f"{height:.2f}",
                (left, height + high),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    temperature = report.get("temperature")
    labels = [setting_title(s, temperature).replace(" at ", "\nat ") for s in settings]
    axes.set_xticks(range(len(settings)), labels, fontsize=9)
    axes.margins(y=0.12)
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title("Speed-up (median over prompts; lines: quartiles)", fontsize=10)
    axes.legend(fontsize=8, loc="best")


def _draw_accuracy(axes: Any, statistics: HeadStatistics) -> None:
    for offset, k, colour in ((-0.2, 1, COLOURS[2]), (0.2, 5, COLOURS[5])):
        accuracy = statistics.top_k_accuracy(k)
        places = [head + offset for head in range(len(accuracy))]
        axes.bar(places, accuracy, 0.4, label=f"top-{k}", color=colour)
        for place, value in zip(places, accuracy, strict=True):
            axes.annotate(
                f"{value:.2f}",
                (place, value),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    heads = range(statistics.num_heads)
    axes.set_xticks(heads, [f"head {i}\n{i + 2} tokens ahead" for i in heads], fontsize=9)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of held-out positions")
    axes.set_title("The true token among a head's best guesses", fontsize=10)
    axes.legend(fontsize=8)
