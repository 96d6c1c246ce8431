"""Both starts are timed, and read the same rows."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.measure import preparation
from scripts.measure.preparation import MeasureArguments, measure, start, table_of
from tests.pairs import with_slow


@pytest.mark.parametrize("kind", with_slow(["messages"], ["tokens", "text"]))
def test_a_corpus_is_made_and_prepared_twice(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which need not import torch again."""

    def here(_: Path, corpus: Path, arguments: MeasureArguments) -> dict[str, Any]:
        return start(str(corpus), arguments)

    monkeypatch.setattr(preparation, "_in_a_process", here)
    arguments = MeasureArguments(kind, rows=60, length=40, max_length=96, folder=str(tmp_path))
    report = measure(arguments)
    first, second = report["starts"]
    assert first["rows"] == second["rows"] > 40 and first["packed_rows"] < first["rows"]
    assert first["tokens"] > 60 * 10 and first["rows_sha256"] == second["rows_sha256"]
    Console().print(table_of(report))
    assert "second start" in capsys.readouterr().out
