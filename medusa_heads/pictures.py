"""Pictures that are read on a page: one look, light or dark, and no two labels on one spot.

A picture is whole on disk or absent. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_heads.files import move_in, staging

DOTS_PER_INCH = 150
BAR_INCHES = 0.26  # of height, for each bar of a panel
_TEXT_POINTS = 8


@dataclass(frozen=True)
class Look:
    """Colours of a picture, after Okabe and Ito, told apart with every kind of colour vision."""

    paper: str  # behind everything; "none" lets the page show
    ink: str  # of text and axes
    faint: str  # of what stands back: grids, baselines, leaders
    colours: tuple[str, ...]

    def settings(self) -> dict[str, Any]:
        inks = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
        papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
        return {
            **dict.fromkeys(inks, self.ink),
            **dict.fromkeys(papers, self.paper),
            "grid.color": self.faint,
            "grid.alpha": 0.3,
            "font.size": _TEXT_POINTS + 1,
            "text.parse_math": False,  # names are anyone's, and may cost $5
            "axes.titlesize": _TEXT_POINTS + 2,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "figure.constrained_layout.w_pad": 0.1,
            "figure.constrained_layout.h_pad": 0.08,
        }


LIGHT = Look(
    *("#ffffff", "#24292f", "#8c959f"),
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"),
)
DARK = Look(
    *("none", "#e6edf3", "#848d97"),
    ("#56b4e9", "#ff8c42", "#2fbf8f", "#e39ac4", "#f0b429", "#3d8fd1", "#a0a0a0"),
)


def save_picture(
    file: Path,
    draw: Callable[[Any], None],
    *,
    size: tuple[float, float],
    look: Look = LIGHT,
    says: str | None = None,
) -> Path:
    """Draw on matplotlib's figure of so many inches, and write or replace a PNG; what it `says` is
    kept within the file, under "Description"."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # drawn without a display: no pyplot

    settings: Any = look.settings()  # of names that matplotlib alone knows
    with staging(file.parent) as made, rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        metadata = {} if says is None else {"Description": says}
        figure.savefig(made / file.name, dpi=DOTS_PER_INCH, metadata=metadata)
        move_in(made, file.parent, [file.name])
    return file


@dataclass(frozen=True)
class Bar:
    """A value with its spread; `ours` has the stronger colour."""

    name: str
    value: float
    low: float
    high: float
    ours: bool = True


def draw_bars(axes: Any, bars: Sequence[Bar], title: str, look: Look = LIGHT) -> None:
    """Horizontal bars, the longest on top, each between its name and its value."""
    ranked = sorted(bars, key=lambda bar: bar.value)
    values = [bar.value for bar in ranked]
    ends = ((bar.value - bar.low, bar.high - bar.value) for bar in ranked)
    spread = [[max(length, 0.0) for length in side] for side in zip(*ends, strict=True)]
    axes.barh(
        [bar.name for bar in ranked],
        values,
        0.66,
        color=[look.colours[0] if bar.ours else look.faint for bar in ranked],
        xerr=spread if any(map(any, spread)) else None,
        error_kw={"ecolor": look.ink, "elinewidth": 0.9, "capsize": 2},
    )
    for place, bar in enumerate(ranked):
        axes.annotate(
            f"{bar.value:.2f}",
            (1.0, place),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=_TEXT_POINTS,
        )
    axes.axvline(1.0, color=look.ink, linewidth=0.8, linestyle="--")
    axes.set_ylim(-0.6, len(ranked) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title)


@dataclass(frozen=True)
class Line:
    """Points that belong together, from left to right; one point is a dot."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "-"


def draw_lines(
    axes: Any,
    lines: Sequence[Line],
    *,
    title: str,
    limit: tuple[str, float] | None = None,
    look: Look = LIGHT,
) -> None:
    """Lines with their names beside their right ends, in their colours, none over another. `limit`
    is a name and a height that no line can reach; scales and axis labels are set already."""
    axes.margins(x=0.04, y=0.08)
    ends = []
    for place, line in enumerate(lines):
        colour = look.colours[place % len(look.colours)]
        across, up = zip(*line.points, strict=True)
        axes.plot(across, up, line.style, marker="o", markersize=4, color=colour)
        ends.append((across[-1], up[-1], line.name, colour))
    if limit is not None:
        name, height = limit
        axes.axhline(height, color=look.faint, linewidth=1.2, linestyle=":")
        ends.append((max(x for x, *_ in ends), height, name, look.faint))
    axes.grid(True)
    axes.set_title(title)
    _name_ends(axes, ends)


def _name_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names in a column right of the axes, each led to its point."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    ranked = sorted(ends, key=lambda end: end[1])
    inches = axes.figure.get_size_inches()[1] / axes.get_subplotspec().get_gridspec().nrows
    gap = 1.5 * _TEXT_POINTS / (72 * 0.65 * inches)
    heights = apart([(y - low) / (high - low) for _, y, _, _ in ranked], gap)
    for (x, y, name, colour), height in zip(ranked, heights, strict=True):
        axes.annotate(
            name,
            (x, y),
            xytext=(1.04, height),
            textcoords="axes fraction",
            va="center",
            color=colour,
            fontsize=_TEXT_POINTS,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6},
        )


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Places in ascending order, moved as little as needed until neighbours are `gap` apart."""
    moved: list[list[float]] = []  # groups: the mean place, and how many stand around it
    for place in places:
        moved.append([place, 1])
        while len(moved) > 1:
            (below, many), (above, few) = moved[-2:]
            if above - below >= gap * (many + few) / 2:
                break
            # The mean that moves all members least.
            moved[-2:] = [[(below * many + above * few) / (many + few), many + few]]
    return [
        mean + (place - (count - 1) / 2) * gap
        for mean, count in moved
        for place in range(int(count))
    ]


def draw_matrix(
    axes: Any, rows: Mapping[str, Sequence[float]], columns: Sequence[str], title: str, look: Look
) -> None:
    """Numbers in a grid, the larger the deeper the colour."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    ends = [to_rgba(look.colours[0], share) for share in (0.0, 0.75)]
    shades = LinearSegmentedColormap.from_list("shades", ends)
    axes.imshow(list(rows.values()), cmap=shades, vmin=0.0, aspect="auto")
    for y, row in enumerate(rows.values()):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=_TEXT_POINTS)
    axes.set_xticks(range(len(columns)), columns, rotation=35, ha="right")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(length=0)
    axes.set_title(title)
