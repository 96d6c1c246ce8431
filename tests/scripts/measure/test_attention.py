"""Attention on a GPU, measured."""

from __future__ import annotations

import pytest

from scripts.measure.attention import main
from tests.conftest import DEVICE, Refused

FEW = [
    "--heads",
    "8",
    "--width",
    "64",
    "--batch_sizes",
    "1",
    "2",
    "--tokens",
    "8",
    "--slots",
    "512",
]


@pytest.mark.skipif(DEVICE != "cpu", reason="there is a GPU")
def test_it_needs_a_gpu(refused: Refused) -> None:
    assert "the device 'cuda' cannot be used here" in refused(main, FEW)


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
def test_a_line_for_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FEW) == 0
    assert capsys.readouterr().out.count("\n| ") == 2 + 4
