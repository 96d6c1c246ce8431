"""Pictures can be read: no label lies on another, and files are whole or absent."""

from __future__ import annotations

from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_heads.pictures import DARK, LIGHT, Bar, Line, apart, draw_bars, draw_lines, save_picture

# Ends that are nearly one point, as those of good methods are.
LINES = [Line(f"method {i}", [(1.0, 1.0), (16.0, 2.0 + 0.01 * i)]) for i in range(7)]
BARS = [Bar(f"a method of number {i}", 0.9 + 0.02 * i, 0.8, 1.4, i % 2 == 0) for i in range(13)]


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), max_size=12), st.floats(0.01, 1))
def test_places_are_apart_and_in_order(places: list[float], gap: float) -> None:
    moved = apart(sorted(places), gap)
    assert len(moved) == len(places)
    assert all(above - below > gap * 0.999 for below, above in pairwise(moved))
    assert sum(moved) == pytest.approx(sum(places), abs=1e-6)


def test_places_that_are_apart_stay() -> None:
    assert apart([0.0, 1.0, 3.0], 0.5) == [0.0, 1.0, 3.0]
    assert apart([1.0, 1.0], 0.5) == [0.75, 1.25]


@pytest.mark.parametrize("kind", ["bars", "lines"])
def test_no_label_lies_on_another(kind: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    if kind == "bars":
        draw_bars(axes, BARS, "thirteen methods")
        texts: list[Any] = [*axes.get_yticklabels(), *axes.texts]
        assert [label.get_text() for label in axes.get_yticklabels()][-1] == BARS[-1].name
    else:
        draw_lines(axes, LINES, title="seven methods", limit=("limit", 2.02))
        texts = list(axes.texts)
        assert len(texts) == len(LINES) + 1
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # Without the line that leads an annotation to its point.
    boxes = [Text.get_window_extent(text, canvas.get_renderer()) for text in texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    width, height = canvas.get_width_height()
    assert all(box.x0 >= 0 and box.x1 <= width and box.y1 <= height for box in boxes)


def test_names_are_no_formulas(tmp_path: Path) -> None:
    bars = [Bar(r"costs $\foo$ or $5", 1.0, 1.0, 1.0)]
    draw = partial(_alone, bars=bars)
    assert save_picture(tmp_path / "a.png", draw, size=(4, 2)).is_file()


def _alone(figure: Any, bars: list[Bar]) -> None:
    draw_bars(figure.subplots(), bars, bars[0].name)


def test_a_failure_leaves_the_old_picture(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    save_picture(file, lambda figure: figure.subplots(), size=(1, 1), look=DARK, says="[1, 2]")
    before = file.read_bytes()
    assert b"Description\0[1, 2]" in before

    def fail(_: Any) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_picture(file, fail, size=(1, 1), look=LIGHT)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
