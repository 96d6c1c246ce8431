"""The report: tables, JSON, picture."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from medusa_heads.inference.bench import plots
from medusa_heads.inference.bench import report as module
from medusa_heads.inference.bench.report import (
    identity_cell,
    markdown,
    tables,
    write_numbers,
    write_report,
)
from medusa_heads.trees.statistics import HeadStatistics


def method(name: str, speedup: float, identical: float) -> dict[str, Any]:
    return {
        "name": name,
        "tokens_per_second": 100.0 * speedup,
        "speedup": speedup,
        "tokens_per_step": 1.4 * speedup,
        "identical": identical,
        "speedup_quartiles": [speedup - 0.1, speedup + 0.1],
    }


@pytest.fixture(autouse=True)
def pictures() -> None:
    """Here they are drawn."""


@pytest.fixture
def report() -> dict[str, Any]:
    methods = [method("plain", 1.0, 1.0), method("other", 0.75, 0.85), method("heads", 1.8, 1.0)]
    common = {"prompts": 20, "new_tokens": 128}
    return {
        "target": "some/target",
        "machine": {"cpu": "A processor", "cores": 2},
        "settings": [
            {"name": "greedy", "dtype": "bfloat16", "methods": methods, **common},
            {"name": "sampled", "dtype": "float32", "methods": [methods[0], methods[2]], **common},
        ],
        "temperature": 0.7,
    }


def test_tables_have_the_reports_numbers(report: dict[str, Any]) -> None:
    first, second = tables(report)
    columns = ["method", "tokens/s", "speed-up", "tokens per step", "output identical"]
    assert [column.header for column in first.columns] == columns
    cells = list(zip(*(column.cells for column in first.columns), strict=True))
    assert cells == [
        ("plain", "100.0", "1.00", "1.40", "-"),
        ("other", "75.0", "0.75", "1.05", "17 of 20"),
        ("heads", "180.0", "1.80", "2.52", "yes"),
    ]
    assert str(first.title).startswith("bf16, greedy: 20 prompts x 128 new tokens")
    assert str(second.title).startswith("fp32, sampled at temperature 0.7")


def test_all_of_the_time_is_drawn() -> None:
    """Also where what comes behind the drafts is one graph, as on a GPU."""
    in_one = {"prefill": 1.0, "draft": 0.5, "step": 8.0, "other": 0.5}
    apart = {"prefill": 1.0, "draft": 0.5, "target": 6.0, "walk": 1.0, "cache": 1.0, "other": 0.5}
    methods = [{"name": f"{i}", "seconds_by_phase": each} for i, each in enumerate((in_one, apart))]
    axes = Figure().subplots()
    plots._draw_phases(axes, methods, "greedy")
    bars: list[Any] = list(axes.patches)
    assert sum(bar.get_width() for bar in bars) == pytest.approx(len(methods))


def test_names_are_no_markup(report: dict[str, Any]) -> None:
    """A category is anyone's, and a compiler's message has paths in brackets."""
    setting = report["settings"][0]
    for each in setting["methods"]:
        each["by_category"] = {name: {"speedup": 1.0} for name in ("[math]", "a [/b]", "c|d")}
    setting["left_out"] = {"plain-compiled": "no [/usr/bin/g++]"}
    console = Console(width=200, record=True, file=StringIO())
    console.print(*tables(report))
    shown = console.export_text()
    assert all(name in shown for name in ("[math]", "a [/b]", "c|d", "no [/usr/bin/g++]"))
    assert r"| c\|d | 1.00 |" in markdown(report)


def test_a_table_fits_an_ordinary_terminal(report: dict[str, Any]) -> None:
    report["settings"][0]["methods"][1]["name"] = "transformers prompt lookup"
    console = Console(width=80, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(tables(report)[0])
    assert "transformers prompt lookup" in captured.get()


def test_sampled_texts_that_another_stream_draws_are_remarked_on(report: dict[str, Any]) -> None:
    ours = report["settings"][1]["methods"][1]
    ours |= {"accepted_by_depth": [0.5], "seconds_by_phase": {"draft": 1.0}}
    for name, remarked in (("heads", True), ("heads+stream", False)):
        ours["name"] = name
        assert ("NAME+stream" in str(tables(report)[1].caption)) is remarked
        assert "NAME+stream" not in str(tables(report)[0].caption)


def test_texts_that_rounding_may_change_are_remarked_on(report: dict[str, Any]) -> None:
    """In half precision another text is no fault; in fp32 it would be."""
    greedy = report["settings"][0]
    for dtype, identical, remarked in (
        ("bfloat16", 0.85, True),
        ("float16", 0.85, True),
        ("bfloat16", 1.0, False),
        ("float32", 0.85, False),
    ):
        greedy["dtype"], greedy["methods"][1]["identical"] = dtype, identical
        assert ("near tie" in str(tables(report)[0].caption)) is remarked
        assert ("near tie" in markdown(report)) is remarked


def test_only_texts_of_the_same_stream_are_said_to_differ_by_rounding(
    report: dict[str, Any],
) -> None:
    sampled = report["settings"][1]
    sampled["dtype"], ours = "bfloat16", sampled["methods"][1]
    ours |= {"accepted_by_depth": [0.5], "seconds_by_phase": {"draft": 1.0}, "identical": 0.5}
    for name, remarked in (("heads", False), ("heads+stream", True)):
        ours["name"] = name
        assert ("near tie" in str(tables(report)[1].caption)) is remarked


def test_identity_is_never_rounded_up_to_yes() -> None:
    assert identity_cell(1.0, 20) == "yes"
    assert identity_cell(0.95, 20) == "19 of 20"
    assert identity_cell(0.0, 3) == "0 of 3"


def test_files_are_written_and_replaced(report: dict[str, Any], tmp_path: Path) -> None:
    statistics = HeadStatistics.from_ranks(torch.tensor([[0, 0], [0, 3], [7, 1]]))
    for speed in (1.0, 2.0):
        report["settings"][0]["methods"][0]["tokens_per_second"] = speed
        json_file, _, png_file = write_report(tmp_path / "new", report, statistics)
        assert json.loads(json_file.read_text()) == report
        assert png_file.read_bytes().startswith(b"\x89PNG")
    written = sorted(path.name for path in json_file.parent.iterdir())
    assert written == ["report.json", "report.md", "report.png"]
    tall = png_file.read_bytes()[20:24]
    write_report(tmp_path / "new", report)  # unmeasured heads: one row of panels
    assert png_file.read_bytes()[20:24] < tall


def test_a_report_in_the_users_home(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert write_report("~/new", report)[0] == tmp_path / "new" / "report.json"


def test_a_failure_leaves_the_old_report(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_report(tmp_path, report)
    before = [file.read_bytes() for file in files]

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(module, "draw", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path, {**report, "target": "another"})
    assert [file.read_bytes() for file in files] == before
    assert len(list(tmp_path.iterdir())) == 3


def test_no_picture_of_other_numbers_stays_beside_new_ones(
    report: dict[str, Any], tmp_path: Path
) -> None:
    """Where a run is interrupted, it would be pushed with them."""
    picture = write_report(tmp_path, report)[-1]
    assert picture.is_file()
    write_numbers(tmp_path, {**report, "target": "another"})
    assert not picture.is_file()


@pytest.fixture
def detailed(report: dict[str, Any]) -> dict[str, Any]:
    """One setting with all that can be measured."""
    setting = report["settings"][0]
    setting["methods"] = [dict(one) for one in setting["methods"]]
    for place, one in enumerate(setting["methods"]):
        one["by_category"] = {"math": {"speedup": 1.0 + place}, "writing": {"speedup": 0.5}}
        one |= {"first_token_seconds": 0.0125, "peak_memory_bytes": 5_000_000}
        if place:
            one |= {"nodes": 8 * place, "accepted_by_depth": [0.75, 0.5]}
            one["seconds_by_phase"] = {"prefill": 1.0, "target": 3.0}
    setting["left_out"] = {"plain-compiled": "no compiler"}
    return report


def test_details_are_on_the_page(detailed: dict[str, Any]) -> None:
    page = markdown(detailed)
    for line in (
        "| heads | 180.0 | 1.80 | 2.52 | yes |",
        "| heads | 1.70 - 1.90 | 12.5 | 5.0 | - |",
        "| heads | 16 | 0.75 0.50 | 25% | 75% |",
        "| math | 1.00 | 2.00 | 3.00 |",
        "plain-compiled left out: no compiler",
    ):
        assert f"\n{line}\n" in page


def test_a_table_of_categories_cuts_no_name(detailed: dict[str, Any]) -> None:
    methods = detailed["settings"][0]["methods"]
    many = [dict(methods[-1], name=f"transformers-number-{i}") for i in range(10)]
    detailed["settings"][0]["methods"] = many
    console = Console(width=80)
    with console.capture() as captured:
        console.print(tables(detailed)[1])
    shown = captured.get()
    assert "\u2026" not in shown and shown.count("3.00") == 10


def test_what_was_measured_is_drawn(detailed: dict[str, Any], tmp_path: Path) -> None:
    *_, png_file = write_report(tmp_path / "detailed", detailed)
    detailed["settings"] = detailed["settings"][1:]
    *_, plain_file = write_report(tmp_path / "plain", detailed)
    (wide, tall), (narrow, flat) = size(png_file), size(plain_file)
    assert wide > narrow and tall > 2 * flat  # three rows of two panels, and one panel


def size(png_file: Path) -> tuple[int, int]:
    header = png_file.read_bytes()[16:24]
    return int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")
