"""The rates with and without the cache: measured on a tiny target, written down."""

import json
from pathlib import Path

import pytest

from scripts.measure.hidden_cache import main


def test_rates_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "measured.json"
    flags = ["--random_target", "32x1x2", "--vocabulary", "100", "--rows", "4", "--length", "16"]
    assert main([*flags, "--repeats", "1", "--epochs", "2", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert set(report["tokens_per_second"]) == {"target", "target, written", "cache"}
    assert all(rate > 0 for rate in report["tokens_per_second"].values())
    assert "times the target's" in capsys.readouterr().out
    assert main(["--epochs", "1"]) == 2
    assert "epochs must be at least 2, got 1" in capsys.readouterr().err
