"""Reliability diagrams by hand."""

import pytest
import torch

from medusa_heads.training.measure.calibration import reliability


def test_bins_and_their_gap_by_hand() -> None:
    confidence = torch.tensor([0.1, 0.3, 0.9, 0.8, 1.0])
    right = torch.tensor([False, True, True, True, False])
    found = reliability(confidence, right, bins=2)
    bins = found["bins"]
    assert [part["count"] for part in bins] == [2, 3]
    assert [part["confidence"] for part in bins] == pytest.approx([0.2, 0.9])
    assert [part["accuracy"] for part in bins] == pytest.approx([0.5, 2 / 3])
    assert found["expected_error"] == pytest.approx((2 * 0.3 + 3 * (0.9 - 2 / 3)) / 5)


def test_empty_bins_are_left_out_and_an_honest_head_has_no_error() -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(20000, generator=generator) * 0.5
    right = torch.rand(20000, generator=generator) < confidence
    found = reliability(confidence, right, bins=10)
    assert len(found["bins"]) == 5 and found["expected_error"] < 0.02
    assert reliability(confidence, ~right, bins=10)["expected_error"] > 0.4
    assert reliability(confidence[:0], right[:0])["expected_error"] == 0
