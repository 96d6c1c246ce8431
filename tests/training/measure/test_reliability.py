"""Reliability diagrams by hand."""

import pytest
import torch

from medusa_heads.training.measure.calibration import Bin, expected_error, reliability


def test_bins_and_their_gap_by_hand() -> None:
    confidence = torch.tensor([0.1, 0.3, 0.9, 0.8, 1.0])
    right = torch.tensor([False, True, True, True, False])
    bins = reliability(confidence, right, bins=2)
    assert [part.count for part in bins] == [2, 3]
    assert [part.confidence for part in bins] == pytest.approx([0.2, 0.9])
    assert [part.accuracy for part in bins] == pytest.approx([0.5, 2 / 3])
    assert expected_error(bins) == pytest.approx((2 * 0.3 + 3 * (0.9 - 2 / 3)) / 5)


def test_empty_bins_are_left_out_and_an_honest_head_has_no_error() -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(20000, generator=generator) * 0.5
    right = torch.rand(20000, generator=generator) < confidence
    bins = reliability(confidence, right, bins=10)
    assert len(bins) == 5 and expected_error(bins) < 0.02
    assert expected_error(reliability(confidence, ~right, bins=10)) > 0.4
    assert expected_error([Bin(0, 0.0, 0.0)]) == 0
