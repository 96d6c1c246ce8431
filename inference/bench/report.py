"""A benchmark's results on disk: `report.json`, `report.md`, `report.png`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_heads.files import replace_file
from medusa_heads.inference.bench.plots import draw
from medusa_heads.inference.bench.tables import markdown
from medusa_heads.trees.statistics import HeadStatistics

JSON_FILE = "report.json"
MARKDOWN_FILE = "report.md"
PNG_FILE = "report.png"


def write_report(
    folder: str | os.PathLike[str],
    report: Mapping[str, Any],
    statistics: HeadStatistics | None = None,
) -> tuple[Path, Path, Path]:
    """Write the three files, each beside its place first; return their paths.

    Args:
        folder: made if it is not there.
        report: what `benchmark` returned.
        statistics: of the heads, to be drawn beside.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    png_file = path / PNG_FILE
    draw(report, statistics, png_file)
    # The numbers last: where they are, the rest is too.
    json_file, markdown_file = write_numbers(path, report)
    return json_file, markdown_file, png_file


def write_numbers(folder: str | os.PathLike[str], report: Mapping[str, Any]) -> tuple[Path, Path]:
    """The report without its picture, which needs matplotlib; returns the two paths.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    json_file, markdown_file = path / JSON_FILE, path / MARKDOWN_FILE
    replace_file(markdown_file, markdown(report))
    replace_file(json_file, json.dumps(report, indent=2) + "\n")
    return json_file, markdown_file
