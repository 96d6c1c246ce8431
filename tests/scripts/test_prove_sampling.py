"""The sampling proof in small: a true rule passes, a lossy one fails, its exact law is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scripts.prove_sampling import SETTINGS, chi_square, exact, prove, tiny_target, verdict


def test_a_setting_and_the_negative_control() -> None:
    name = "all together"
    outcomes = prove(1000, seed=0, settings={name: SETTINGS[name]})
    assert verdict(outcomes)
    assert [o.acceptance for o in outcomes] == ["lossless"] * 4 + ["typical"] * 2
    assert [o.tokens for o in outcomes] == [2, 3] * 3
    assert all(o.tokens_per_step > 1.02 for o in outcomes)
    # Swapped, the verdict turns: it does depend on what was drawn.
    assert not verdict([*outcomes[:4], replace(outcomes[4], acceptance="lossless")])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_exact_law_is_a_distribution(name: str) -> None:
    joint_VVV = exact(tiny_target(), SETTINGS[name])
    assert joint_VVV.shape == (16, 16, 16)
    assert joint_VVV.sum().item() == pytest.approx(1.0, abs=1e-5)


def test_chi_square_by_hand() -> None:
    counts, probabilities = torch.tensor([30.0, 70.0, 0.0]), torch.tensor([0.5, 0.5, 0.0])
    statistic, degrees = chi_square(counts, probabilities)
    assert (statistic, degrees) == (16.0, 1)
    impossible = torch.tensor([30.0, 69.0, 1.0])
    assert chi_square(impossible, probabilities)[0] == float("inf")
