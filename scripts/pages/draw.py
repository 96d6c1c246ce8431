"""The pictures of the pages, drawn from the tables that stand beside them, light and dark.

    python -m scripts.pages.draw

Each file keeps, under "Description", the numbers that it shows. A test compares them with the
tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from medusa_heads.inference.bench.plots import is_ours
from medusa_heads.pictures import (
    BAR_INCHES,
    DARK,
    LIGHT,
    Bar,
    Line,
    Look,
    draw_bars,
    draw_lines,
    save_picture,
)
from scripts.pages.idea import IDEA_INCHES, draw_idea

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "benchmarks"
FOLDER = ROOT / "docs" / "pictures"
LOOKS = {"light": LIGHT, "dark": DARK}
PANEL_INCHES = 4.6  # of width: two stand beside each other on a page
HEADS = 4  # of the demo, whose trees are drawn
_SAMPLED = "tokens per step, T = 0.7"
Row = Mapping[str, str]
Settings = Mapping[str, Sequence[tuple[str, float, float, float]]]  # name, speed-up and quartiles


@dataclass(frozen=True)
class Picture:
    """What is drawn.

    Attributes:
        draw: with a look, on a figure.
        size: in inches.
        shown: the numbers in it.
    """

    draw: Callable[[Look, Any], None]
    size: tuple[float, float]
    shown: Any


def pictures() -> dict[str, Picture]:
    """All of them, by the names of their files."""
    demo = read_table(RECORD / "README.md", "The demo", "setting")
    methods = RECORD / "methods.md"
    grown = read_table(methods, "At the cost of a larger model", "method")
    small = read_table(methods, "On the demo's target", "method")
    return {
        "demo": _bars(_demo_settings(demo)),
        "methods-grown": _bars(_method_settings(grown)),
        "methods-demo": _bars(_method_settings(small)),
        "nodes": _nodes(read_table(RECORD / "engine.md", "Auto against fixed trees", "tree")),
        "batches": _batches(read_table(RECORD / "engine.md", "Expected by batch size", "rows")),
        "idea": Picture(draw_idea, IDEA_INCHES, "a drawing"),
    }


def read_table(page: Path, heading: str, column: str) -> list[Row]:
    """Under a heading of a page, the first table whose first column is named so.

    Raises:
        ValueError: there is none.
    """
    text = page.read_text(encoding="utf-8")
    below = text.partition(f"\n## {heading}\n")[2]
    lines = iter(below.splitlines())
    for line in lines:
        if line.startswith("|") and (names := _cells(line))[0] == column:
            next(lines)
            rows: list[Row] = []
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(names, _cells(row), strict=True)))
            return rows
    raise ValueError(f"{page.name} has no table of {column!r} under {heading!r}")


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]


def _numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", cell)]


def _demo_settings(rows: Sequence[Row]) -> Settings:
    """The demo's table names a setting in its first row alone."""
    settings: dict[str, list[tuple[str, float, float, float]]] = {}
    for row in rows:
        if row["setting"]:
            bars = settings.setdefault(row["setting"], [])
            bars.append(("plain-compiled", 1.0, 1.0, 1.0))  # what the others are divided by
        (value,) = _numbers(row["speed-up"])
        bars.append((row["method"], value, value, value))
    return settings


def _method_settings(rows: Sequence[Row]) -> Settings:
    """Greedy and sampled stand beside each other in a row."""
    halves = {"greedy": "speed-up (quartiles)", "T = 0.7": "speed-up (quartiles), T = 0.7"}
    settings: dict[str, list[tuple[str, float, float, float]]] = {name: [] for name in halves}
    for row in rows:
        for name, column in halves.items():
            value, *spread = _numbers(row[column])
            low, high = spread or (value, value)
            settings[name].append((row["method"], value, low, high))
    return settings


def _bars(settings: Settings) -> Picture:
    columns = 2
    lines = -(-len(settings) // columns)
    most = max(len(bars) for bars in settings.values())

    def draw(look: Look, figure: Any) -> None:
        grid = figure.subplots(lines, columns, squeeze=False).flatten()
        for axes, (name, bars) in zip(grid, settings.items(), strict=True):
            drawn = [Bar(*bar, ours=is_ours(bar[0])) for bar in bars]
            draw_bars(axes, drawn, name, look)
        for axes in grid[-columns:]:
            axes.set_xlabel("speed-up over compiled plain decoding")

    size = (PANEL_INCHES * columns, lines * (0.5 + BAR_INCHES * most) + 0.3)
    return Picture(draw, size, settings)


def _nodes(rows: Sequence[Row]) -> Picture:
    """Tokens per step of trees by their size, greedy and sampled."""
    shown: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        kind, _, nodes = row["tree"].partition(":")
        if kind in ("static", "dynamic"):
            for decoding, column in (("greedy", "tokens per step"), ("T = 0.7", _SAMPLED)):
                line = shown.setdefault(f"{kind}, {decoding}", [])
                line.append((int(nodes), float(row[column])))
    lines = [Line(n, points, "-" if "greedy" in n else "--") for n, points in shown.items()]

    def draw(look: Look, figure: Any) -> None:
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("draft tokens of a step (nodes of the tree)")
        axes.set_ylabel("tokens per step")
        limit = (f"limit of {HEADS} heads", HEADS + 1.0)
        title = "Each further draft token gains less"
        draw_lines(axes, lines, title=title, limit=limit, look=look)

    return Picture(draw, (6.0, 3.4), shown)


def _batches(rows: Sequence[Row]) -> Picture:
    shown = [(int(row["rows"]), float(row["speed-up"])) for row in rows]

    def draw(look: Look, figure: Any) -> None:
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.set_xticks([size for size, _ in shown], [str(size) for size, _ in shown])
        axes.axhline(1.0, color=look.ink, linewidth=0.8, linestyle="--")
        axes.set_xlabel("rows decoded together (batch size)")
        axes.set_ylabel("expected speed-up")
        line = Line("best draft", shown)
        draw_lines(axes, [line], title="Drafts gain less where rows are many", look=look)

    return Picture(draw, (6.0, 3.0), shown)


def described(picture: Picture) -> str:
    """What a picture's file says of itself."""
    return json.dumps(picture.shown)


def main() -> None:
    """Draw all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        for look_name, look in LOOKS.items():
            save_picture(
                FOLDER / f"{name}-{look_name}.png",
                partial(picture.draw, look),
                size=picture.size,
                look=look,
                says=described(picture),
            )


if __name__ == "__main__":
    main()
