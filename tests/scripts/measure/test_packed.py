"""`scripts.measure.packed`: forwards of few tokens by packed matrices, beside the target's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.measure.packed import TOKENS, main
from tests.conftest import Refused, TinyLlama


@pytest.mark.slow
def test_it_prints_a_row_for_each_number_of_tokens(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    assert main(["--target", str(tmp_path), "--rounds", "1", "--context", "16"]) == 0
    shown = capsys.readouterr().out
    assert "128 x 64: packed " in shown
    for tokens in TOKENS:
        assert f" {tokens} " in shown


def test_mistakes_are_one_sentence(refused: Refused) -> None:
    assert "nowhere" in refused(main, ["--target", "nowhere/at/all"])
