"""The rates with and without the cache: measured on a tiny target, written down."""

import json
from pathlib import Path

import pytest

from scripts.measure import hidden_opening
from scripts.measure.hidden_cache import main


def test_rates_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "measured.json"
    flags = ["--random_target", "32x1x2", "--vocabulary", "100", "--rows", "4", "--length", "16"]
    flags += ["--folder", str(tmp_path), "--repeats", "1"]
    assert main([*flags, "--epochs", "2", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert set(report["tokens_per_second"]) == {"target", "target, written", "cache"}
    assert len(report["bytes_per_second"]) == 4 and report["bytes"] == 4 * 15 * 32 * 4
    rates = [*report["tokens_per_second"].values(), *report["bytes_per_second"].values()]
    assert all(rate > 0 for rate in rates)
    assert "rows, shard by shard" in capsys.readouterr().out
    assert main(["--epochs", "-1"]) == 2
    assert "epochs must be at least 0, got -1" in capsys.readouterr().err


def test_opening_is_measured_of_every_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "measured.json"
    flags = ["--shards", "20", "--rows", "2", "--positions", "3", "--width", "8", "--ranks", "3"]
    given = [*flags, "--folder", str(tmp_path), "--output", str(output)]
    assert hidden_opening.main(given) == 0
    report = json.loads(output.read_text())
    assert len(report["seconds_to_open"]) == 3 and report["bytes"] >= 20 * 2 * 3 * 8 * 2
    assert "longest, s" in capsys.readouterr().out
