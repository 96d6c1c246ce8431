"""`medusa-heads analyze`: tables, files, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medusa_heads import MedusaModel
from medusa_heads.cli.verbs.analyze import main
from medusa_heads.inference.bench import memory
from tests.conftest import Refused


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens are watched for the memory they take, and once a test."""
    monkeypatch.setattr(memory, "_NEW", 8)
    watched, made = memory.Memory, list[memory.Memory]()

    def once(model: MedusaModel) -> memory.Memory:
        made[:] = made or [watched(model)]
        return made[0]

    monkeypatch.setattr(memory, "Memory", once)


@pytest.mark.usefixtures("quiet", "short_texts")
def test_tables_and_files(
    speaker: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads, output = str(speaker / "heads"), tmp_path / "analysis"
    flags = ["--batch-sizes", "1", "--context", "16", "--report", str(output)]
    assert main([heads, *flags]) == 0
    shown = capsys.readouterr().out
    for words in ("chain:2", "static:63", "theorem", "Drafting pays", "the heads, as held"):
        assert words in shown
    assert "waited for processors" not in shown
    report = json.loads((output / "analysis.json").read_text())
    assert report["context"] == 16 and report["memory"]["heads"] > 0
    assert report["target"] == str(speaker / "target") and (output / "analysis.png").is_file()
    measured = {path: path.read_text() for path in cache.rglob("*.json")}
    assert len(measured) == 2  # chains and trees

    assert main([heads, *flags[:-2]]) == 0  # nothing is measured again
    assert {path: path.read_text() for path in cache.rglob("*.json")} == measured
    assert main([heads, *flags[:-2], "--refresh"]) == 0
    assert {path: path.read_text() for path in cache.rglob("*.json")} != measured


@pytest.mark.slow
@pytest.mark.usefixtures("busy", "short_texts")
def test_a_busy_machine_is_named_below_the_tables(
    speaker: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(speaker / "heads"), "--batch-sizes", "1", "2", "--context", "16"]
    assert main([*flags, "--report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.index("memory at most") < shown.index("Steps waited for processors")
    assert json.loads((tmp_path / "analysis.json").read_text())["beside_others"] is True
    assert not (cache / "steps").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], "expected a heads checkpoint"),
        (["{}/heads", "--context", "0"], "at least 1"),
        (["{}/heads", "--batch-sizes", "0"], "at least 1"),
        (["{}/heads", "--context", "500"], "do not fit the target's 512 positions: 449 at most"),
        (["{}/heads", "--report", "{}/heads/config.json"], "expected a folder at"),
        (["{}/heads", "--batch-size", "2"], "did you mean '--batch_sizes'"),
    ],
)
def test_mistakes_are_one_sentence(
    flags: list[str], message: str, speaker: Path, refused: Refused
) -> None:
    assert message in refused(main, [flag.format(speaker) for flag in flags])


def test_heads_without_statistics(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkpoint / "heads")]) == 2
    assert "carry no statistics" in capsys.readouterr().err
