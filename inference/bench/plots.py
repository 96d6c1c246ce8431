"""A benchmark's results as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from medusa_heads.pictures import (
    BAR_INCHES,
    LIGHT,
    Bar,
    Line,
    draw_bars,
    draw_lines,
    draw_matrix,
    save_picture,
)
from medusa_heads.trees.statistics import HeadStatistics

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_PHASES = ("prefill", "draft", "target", "walk", "cache", "other", "step")
_WIDE = 6.4  # inches of a panel
_FLAT = 3.6
Panel = tuple[Callable[[Any], None], float]  # draws on matplotlib axes; its height in inches


def setting_title(setting: Mapping[str, Any], temperature: float | None = None) -> str:
    """For example `bf16, sampled at temperature 0.7, 8 rows`."""
    title = f"{DTYPES.get(setting['dtype'], setting['dtype'])}, {setting['name']}"
    if setting["name"] == "sampled" and temperature is not None:
        title += f" at temperature {temperature:g}"
    rows = setting.get("batch_size", 1)
    return f"{title}, {rows} rows" if rows > 1 else title


def where_measured(machine: Mapping[str, Any]) -> str:
    """The GPU of a report's machine, or else its processor."""
    return machine.get("gpu") or f"{machine['cores']} cores, {machine['cpu']}"


def target_name(report: Mapping[str, Any]) -> str:
    """The last part of the target's name or path."""
    return Path(str(report["target"])).name or "target"


def draw(report: Mapping[str, Any], statistics: HeadStatistics | None, file: Path) -> None:
    """Write the picture: speed-ups, and beside them what else the report can show."""
    panels = _panels(report, statistics)
    columns = min(len(panels), 2)
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [max(inches for _, inches in row) for row in rows]

    def fill(figure: Any) -> None:
        ratios = {"height_ratios": heights}
        grid = figure.subplots(len(rows), columns, squeeze=False, gridspec_kw=ratios)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (draw_panel, _) in zip(grid.flat, panels, strict=False):
            draw_panel(axes)
        where = where_measured(report["machine"])
        figure.suptitle(f"{target_name(report)} on {where}", fontsize=11)

    save_picture(file, fill, size=(_WIDE * columns, sum(heights) + 0.3))


def _panels(report: Mapping[str, Any], statistics: HeadStatistics | None) -> list[Panel]:
    """What there is to draw: speed-ups of each setting, then details, which are the first one's."""
    settings, temperature = report["settings"], report.get("temperature")
    panels = [_speedups(setting, setting_title(setting, temperature)) for setting in settings]
    if by_rows := _by_rows(settings):
        panels.append((partial(_draw_batches, by_rows=by_rows), _FLAT))
    methods, title = settings[0]["methods"], setting_title(settings[0], temperature)
    if by_category := methods[0].get("by_category"):
        drawn = partial(_draw_categories, methods=methods, title=title)
        panels.append((drawn, 1.6 + BAR_INCHES * len(by_category)))
    if len(drafting := [method for method in methods if "nodes" in method]) > 1:
        drawn = partial(_draw_nodes, methods=drafting, title=title, statistics=statistics)
        panels.append((drawn, max(_FLAT, BAR_INCHES * len(drafting))))
    if timed := [method for method in methods if "seconds_by_phase" in method]:
        drawn = partial(_draw_phases, methods=timed, title=title)
        panels.append((drawn, 1.2 + BAR_INCHES * len(timed)))
    if statistics is not None:
        panels.append((partial(_draw_accuracy, statistics=statistics), _FLAT))
    return panels


def _speedups(setting: Mapping[str, Any], title: str) -> Panel:
    bars = []
    for method in setting["methods"]:
        low, high = method.get("speedup_quartiles", [method["speedup"]] * 2)
        bars.append(Bar(method["name"], method["speedup"], low, high, is_ours(method["name"])))
    title = f"Speed-up over plain decoding\n{title}"
    return partial(draw_bars, bars=bars, title=title), 0.9 + BAR_INCHES * len(bars)


def is_ours(name: str) -> bool:
    """Whether a method is this engine's, and not plain decoding or transformers'."""
    return not name.startswith(("plain", "transformers"))


def _by_rows(settings: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Speed-up by batch size of each method of this engine, where several sizes were measured."""
    first = settings[0]
    alike = [s for s in settings if (s["name"], s["dtype"]) == (first["name"], first["dtype"])]
    points = sorted(
        (setting.get("batch_size", 1), place, method["name"], method["speedup"])
        for setting in alike
        for place, method in enumerate(setting["methods"])
    )
    found: dict[str, list[tuple[float, float]]] = {}
    for size, _, name, speedup in points:
        if is_ours(name):
            found.setdefault(name, []).append((size, speedup))
    return [Line(*line) for line in found.items()] if points[0][0] < points[-1][0] else []


def _draw_batches(axes: Any, by_rows: Sequence[Line]) -> None:
    sizes = sorted({int(x) for line in by_rows for x, _ in line.points})
    speedup_axes(axes, "rows decoded together", "speed-up over plain decoding")
    axes.set_xticks(sizes, map(str, sizes))
    draw_lines(axes, by_rows, title="Speed-up by batch size")


def speedup_axes(axes: Any, along: str, measured: str) -> None:
    """Speed-ups over what grows in powers of two, and the line of plain decoding."""
    axes.set_xscale("log", base=2)
    axes.set(xlabel=along, ylabel=measured)
    axes.axhline(1.0, color=LIGHT.ink, linewidth=0.8, linestyle="--")


def _draw_categories(axes: Any, methods: Sequence[Mapping[str, Any]], title: str) -> None:
    rows = {
        category: [method["by_category"][category]["speedup"] for method in methods]
        for category in methods[0]["by_category"]
    }
    names = [method["name"] for method in methods]
    draw_matrix(axes, rows, names, f"Speed-up by category\n{title}", LIGHT)


def _draw_nodes(
    axes: Any, methods: Sequence[Mapping[str, Any]], title: str, statistics: HeadStatistics | None
) -> None:
    """The limit is that of heads: each of them right, and the target's own token."""
    axes.set(xlabel="draft tokens of a step, at most", ylabel="tokens per step")
    limit = None
    if statistics is not None:
        limit = (f"limit of {statistics.num_heads} heads alone", statistics.num_heads + 1.0)
    lines = [Line(m["name"], [(m["nodes"], m["tokens_per_step"])]) for m in methods]
    draw_lines(axes, lines, title=f"What trees of a size give\n{title}", limit=limit)


def _draw_phases(axes: Any, methods: Sequence[Mapping[str, Any]], title: str) -> None:
    names = [method["name"] for method in methods]
    phases = [method["seconds_by_phase"] for method in methods]
    lefts = [0.0] * len(methods)
    for name, colour in zip(_PHASES, LIGHT.colours, strict=True):
        if not any(name in seconds for seconds in phases):
            continue
        shares = [seconds.get(name, 0.0) / sum(seconds.values()) for seconds in phases]
        axes.barh(names, shares, 0.66, left=lefts, label=name, color=colour)
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the time")
    axes.set_title(f"Where the time goes\n{title}", pad=26)
    axes.legend(fontsize=8, ncols=len(_PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_accuracy(axes: Any, statistics: HeadStatistics) -> None:
    for offset, k in ((-0.2, 1), (0.2, 5)):
        accuracy = statistics.top_k_accuracy(k)
        places = [head + offset for head in range(len(accuracy))]
        bars = axes.bar(places, accuracy, 0.38, label=f"top-{k}", color=LIGHT.colours[k // 5])
        axes.bar_label(bars, fmt="{:.2f}", padding=2, fontsize=8)
    heads = range(statistics.num_heads)
    axes.set_xticks(heads, [f"head {i}\n{i + 2} ahead" for i in heads])
    axes.set(ylim=(0, 1), ylabel="share of held-out positions")
    axes.set_title("The true token among a head's best guesses")
    axes.legend(ncols=2)
