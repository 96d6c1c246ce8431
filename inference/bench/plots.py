"""A benchmark's results as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from medusa_heads.inference.bench.tables import setting_title
from medusa_heads.trees.statistics import HeadStatistics

# Okabe and Ito's palette: told apart with every kind of colour vision, and in grey.
COLOURS = ("#7f7f7f", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_PHASES = ("prefill", "draft", "target", "walk", "cache", "other")
Panel = Callable[[Any], None]  # draws on matplotlib axes


def draw(report: Mapping[str, Any], statistics: HeadStatistics | None, file: Path) -> None:
    """Write the picture: speed-ups, and beside them what else the report can show."""
    from matplotlib.figure import Figure  # drawn without a display: no pyplot

    panels = _panels(report, statistics)
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(12 if columns == 2 else 7, 4.8 * rows), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, panel in zip(places, panels, strict=False):
        panel(axes)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    name = Path(str(report["target"])).name or "target"
    machine = report["machine"]
    where = machine.get("gpu") or f"{machine['cores']} cores, {machine['cpu']}"
    figure.suptitle(f"{name} on {where}", fontsize=11)
    figure.savefig(file, dpi=150)


def _panels(report: Mapping[str, Any], statistics: HeadStatistics | None) -> list[Panel]:
    """What there is to draw; details are those of the first setting."""
    first = report["settings"][0]
    title = setting_title(first, report.get("temperature"))
    panels: list[Panel] = [partial(_draw_speedups, report=report)]
    if "by_category" in first["methods"][0]:
        panels.append(partial(_draw_categories, setting=first, title=title))
    drafting = [method for method in first["methods"] if "nodes" in method]
    if len(drafting) > 1:
        panels.append(partial(_draw_nodes, methods=drafting, title=title))
    if timed := [method for method in first["methods"] if "seconds_by_phase" in method]:
        panels.append(partial(_draw_phases, methods=timed, title=title))
    if statistics is not None:
        panels.append(partial(_draw_accuracy, statistics=statistics))
    return panels


def _draw_speedups(axes: Any, report: Mapping[str, Any]) -> None:
    settings: Sequence[Mapping[str, Any]] = report["settings"]
    names = list(dict.fromkeys(m["name"] for s in settings for m in s["methods"]))
    for place, name in enumerate(names):
        found = [(x, m) for x, s in enumerate(settings) for m in s["methods"] if m["name"] == name]
        _draw_bars(axes, place, len(names), name, found, numbers=len(names) < 5)
    temperature = report.get("temperature")
    labels = [
        setting_title(s, temperature).replace(", ", "\n").replace(" at ", "\nat ") for s in settings
    ]
    axes.set_xticks(range(len(settings)), labels, fontsize=9)
    axes.set_title("Speed-up (median over prompts; lines: quartiles)", fontsize=10)
    _finish_bars(axes)


def _draw_categories(axes: Any, setting: Mapping[str, Any], title: str) -> None:
    methods = setting["methods"]
    categories = list(methods[0]["by_category"])
    for place, method in enumerate(methods):
        found = [(x, method["by_category"][category]) for x, category in enumerate(categories)]
        _draw_bars(axes, place, len(methods), method["name"], found)
    axes.set_xticks(range(len(categories)), categories, fontsize=8, rotation=30, ha="right")
    axes.set_title(f"Speed-up by category ({title})", fontsize=10)
    _finish_bars(axes)


def _draw_bars(
    axes: Any,
    place: int,
    methods: int,
    name: str,
    found: Sequence[tuple[int, Mapping[str, Any]]],
    *,
    numbers: bool = False,
) -> None:
    width = 0.8 / methods
    lefts = [x + (place - (methods - 1) / 2) * width for x, _ in found]
    heights = [entry["speedup"] for _, entry in found]
    spans = [entry.get("speedup_quartiles", [entry["speedup"]] * 2) for _, entry in found]
    errors = [
        [max(h - low, 0.0) for h, (low, _) in zip(heights, spans, strict=True)],
        [max(high - h, 0.0) for h, (_, high) in zip(heights, spans, strict=True)],
    ]
    colour = COLOURS[place % len(COLOURS)]
    hatch = "//" if place >= len(COLOURS) else None  # the colours come again
    axes.bar(lefts, heights, width, label=name, color=colour, hatch=hatch, yerr=errors, capsize=2)
    for left, height, high in zip(lefts, heights, errors[1], strict=True):
        if numbers:
            _write_above(axes, left, height + high, height)


def _finish_bars(axes: Any) -> None:
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.margins(y=0.12)
    axes.set_ylabel("speed-up over plain decoding")
    _legend_below(axes)


def _legend_below(axes: Any) -> None:
    """Where it hides no bar, however many there are."""
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _draw_nodes(axes: Any, methods: Sequence[Mapping[str, Any]], title: str) -> None:
    for place, method in enumerate(methods):
        point = (method["nodes"], method["tokens_per_step"])
        axes.plot(*point, "o", color=COLOURS[place % len(COLOURS)])
        axes.annotate(method["name"], point, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.margins(x=0.2, y=0.12)
    axes.set_xlabel("tokens drafted at a step, at most")
    axes.set_ylabel("tokens per step")
    axes.grid(alpha=0.3)
    axes.set_title(f"What trees of a size give ({title})", fontsize=10)


def _draw_phases(axes: Any, methods: Sequence[Mapping[str, Any]], title: str) -> None:
    names = [method["name"] for method in methods]
    lefts = [0.0] * len(methods)
    for place, phase in enumerate(_PHASES):
        shares = [
            method["seconds_by_phase"].get(phase, 0.0) / sum(method["seconds_by_phase"].values())
            for method in methods
        ]
        colour = COLOURS[place % len(COLOURS)]
        axes.barh(range(len(methods)), shares, 0.6, left=lefts, label=phase, color=colour)
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.set_yticks(range(len(methods)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the time")
    _legend_below(axes)
    axes.set_title(f"Where the time goes ({title})", fontsize=10)


def _draw_accuracy(axes: Any, statistics: HeadStatistics) -> None:
    for offset, k, colour in ((-0.2, 1, COLOURS[2]), (0.2, 5, COLOURS[5])):
        accuracy = statistics.top_k_accuracy(k)
        places = [head + offset for head in range(len(accuracy))]
        axes.bar(places, accuracy, 0.4, label=f"top-{k}", color=colour)
        for place, value in zip(places, accuracy, strict=True):
            _write_above(axes, place, value, value)
    heads = range(statistics.num_heads)
    axes.set_xticks(heads, [f"head {i}\n{i + 2} tokens ahead" for i in heads], fontsize=9)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of held-out positions")
    axes.set_title("The true token among a head's best guesses", fontsize=10)
    axes.legend(fontsize=8)


def _write_above(axes: Any, x: float, y: float, value: float) -> None:
    axes.annotate(
        f"{value:.2f}",
        (x, y),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )
