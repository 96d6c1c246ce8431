"""What was measured on a GPU, beside the goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.measure.goals import main
from tests.conftest import Refused


def measured(
    folder: Path, rows: int, speedups: dict[str, float], reference: str = "plain-compiled"
) -> None:
    methods = [{"name": name, "speedup": speedup} for name, speedup in speedups.items()]
    setting: dict[str, Any] = {"batch_size": rows, "reference": reference, "methods": methods}
    (folder / f"usual-{rows}").mkdir()
    report = folder / f"usual-{rows}" / "report.json"
    report.write_text(json.dumps({"settings": [setting]}))


@pytest.mark.parametrize(
    ("alone", "together", "code"), [(2.6, 1.01, 0), (2.4, 1.2, 1), (3.0, 0.9, 1)]
)
def test_each_goal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    alone: float,
    together: float,
    code: int,
) -> None:
    measured(tmp_path, 1, {"heads:auto": alone, "heads:static:15": 0.1})
    measured(tmp_path, 32, {"heads:auto": together, "heads:auto+kernels": 0.5})
    assert main(["--folder", str(tmp_path)]) == code
    shown = capsys.readouterr().out
    assert "static" not in shown and shown.count("heads:auto+kernels") == 1
    assert f"{alone:.2f}" in shown and f"{together:.2f}" in shown


@pytest.mark.parametrize("reference", [None, "plain"])
def test_what_was_not_measured(tmp_path: Path, refused: Refused, reference: str | None) -> None:
    if reference is not None:
        measured(tmp_path, 1, {"heads:auto": 9.0}, reference)
    assert "holds no heads:auto beside plain-compiled" in refused(main, ["--folder", str(tmp_path)])
