"""Steps beside the target's forward; the real demo target, as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.grown import shares
from scripts.grown.shares import main
from tests.conftest import Refused

QUICK = ["--shape", "own", "--dtype", "float32", "--compile", "capture", "--new_tokens", "4"]


@pytest.mark.slow
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("drawn", [[], ["--temperature", "0.7", "--top_p", "0.9"]])
def test_steps_and_forwards(
    drawn: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for count in ("_WARM_UP", "_TEXTS", "_FORWARDS"):
        monkeypatch.setattr(shares, count, 1)
    output = tmp_path / "shares.json"
    flags = ["--nodes", "4", "--batch_sizes", "2", "--output", str(output), *drawn]
    assert main([*QUICK, *flags]) == 0
    report = json.loads(output.read_text())
    assert [(row["rows"], row["tree"]) for row in report["steps"]] == [
        (2, "static:3"),
        (2, "auto"),
    ]
    for row in report["steps"]:
        assert row["step"] > row["forward"] / 2 > 0 and row["tokens_per_step"] >= 1
        assert row["nodes"] == 4 or (row["tree"] == "auto" and row["nodes"] < 4)
        assert row["beside"] == pytest.approx(row["step"] / row["forward"] - 1)
        assert row["kernels"][0]["us"] >= row["kernels"][-1]["us"] > 0
    assert "beside" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes", "1"], "nodes of at least 2"),
        (["--batch_sizes", "0"], "rows and new tokens of at least 1"),
        (QUICK, "steps are recorded on an NVIDIA GPU alone, and this is cpu"),
    ],
)
def test_mistakes_are_one_sentence(flags: list[str], message: str, refused: Refused) -> None:
    assert message in refused(main, [*flags, "--device", "cpu"])
