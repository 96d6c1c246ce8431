"""The picture of the idea: heads draft a tree, one forward of the target verifies it."""

from __future__ import annotations

from typing import Any

from medusa_heads.pictures import Look

IDEA_INCHES = (9.2, 3.3)
_WIDTH, _HEIGHT = 92.0, 33.0
# Of each node its place, its token, its parent, and whether the target agrees.
_NODES: tuple[tuple[float, float, str, int | None, bool], ...] = (
    (57, 17, ")", None, True),
    (67, 24, ":", 0, True),
    (67, 10, "->", 0, False),
    (77, 28, "\\n", 1, True),
    (77, 20, "#", 1, False),
    (77, 10, "None", 2, False),
    (87, 28, "return", 3, False),
)


def draw_idea(look: Look, figure: Any) -> None:
    """Text, target, heads, and the tree with the path that is kept."""
    axes = figure.subplots()
    axes.set_xlim(0, _WIDTH)
    axes.set_ylim(0, _HEIGHT)
    axes.set_axis_off()
    kept, refused = look.colours[2], look.faint
    _box(axes, 6, 17, "def main(", look.ink, "the text so far")
    _box(axes, 21, 17, "target", look.ink, "frozen, unmodified")
    _arrow(axes, (11.5, 17), (17.2, 17), look.ink)
    for place, y in enumerate((25.0, 17.0, 9.0)):
        _box(axes, 39, y, f"head {place}", look.colours[0], f"guesses {place + 2} ahead")
        _arrow(axes, (25, 17), (35, y), look.ink)
    axes.text(28, 25.5, "hidden state", fontsize=8, color=look.ink)
    _arrow(axes, (45.5, 17), (53.5, 17), look.ink)
    boxes: list[Any] = []
    for x, y, token, parent, agreed in _NODES:
        colour = kept if agreed else refused
        boxes.append(_box(axes, x, y, token, colour))
        if parent is not None:
            ends = {"patchA": boxes[parent], "patchB": boxes[-1], "shrinkA": 0, "shrinkB": 0}
            style = {"arrowstyle": "-", "color": colour, "linewidth": 1.6}
            axes.annotate("", (x, y), _NODES[parent][:2], arrowprops=style | ends)
    axes.text(72, 31.8, "one forward of the target reads the whole tree", ha="center", fontsize=9)
    below = "kept: the longest path that the target agrees with,\nand the target's own next token"
    axes.text(72, 1.0, below, ha="center", color=kept, fontsize=9)


def _box(axes: Any, x: float, y: float, text: str, colour: str, below: str = "") -> Any:
    """A word in a frame, which is returned, with a remark below it."""
    style = {"boxstyle": "round,pad=0.35", "facecolor": "none", "edgecolor": colour}
    font = {"ha": "center", "va": "center", "color": colour, "family": "monospace"}
    word = axes.text(x, y, text, bbox=style, **font)
    axes.text(x, y - 2.3, below, ha="center", va="top", fontsize=7.5, color=colour)
    return word.get_bbox_patch()


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": colour})
