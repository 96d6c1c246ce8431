"""What drafting takes: every kind is drafted with, and is set beside the target."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.measure.drafting import KINDS, main
from tests.conftest import Refused, TinyLlama


def test_every_kind_is_measured(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    amounts = "--num_heads 3 --context 16 --rounds 2 --dtype float32 --trees static:8 dynamic:8"
    assert main(["--target", str(tmp_path), *amounts.split()]) == 0
    printed = capsys.readouterr().out
    for kind in KINDS:
        assert printed.count(f" {kind} ") == 2
    assert "the target, one token" in printed and " 1.00 " in printed


@pytest.mark.slow
def test_checkpoints_are_measured_behind_text(capsys: pytest.CaptureFixture[str]) -> None:
    amounts = "--context 16 --rounds 2 --dtype float32 --trees dynamic:8"
    assert main(["--heads", "assets/demo-heads", *amounts.split()]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" dynamic:8 ") == printed.count(" demo-heads ") == 1
    assert not any(f" {kind} " in printed for kind in KINDS)


def test_unknown_kinds_are_refused(refused: Refused) -> None:
    assert "kinds are independent, corrected" in refused(main, ["--kinds", "medusa"])
