"""The measurement of chains as rows over copies of a state runs, and knows its targets."""

from __future__ import annotations

import re

import pytest

from scripts.measure import state_rows


@pytest.mark.parametrize("count", [1, pytest.param(len(state_rows._OWN), marks=pytest.mark.slow)])
def test_every_kind_is_measured(
    count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = list(state_rows._OWN)[:count]
    small = {"vocab_size": 64, "intermediate_size": 64}
    monkeypatch.setattr(state_rows, "_SIZE", state_rows._SIZE | small)
    flags = ["--rounds", "1", "--tokens", "2", "--context", "8", "--kinds", *kinds]
    assert state_rows.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == kinds
    for line in lines:
        assert re.search(r"2 tokens a row: 1 rows \d+ ms, 2 rows \d+ ms, 4 rows \d+ ms$", line)


def test_other_kinds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert state_rows.main(["--kinds", "llama"]) != 0
    assert "kinds are of qwen3_5_text, lfm2, falcon_h1, got llama" in capsys.readouterr().err
