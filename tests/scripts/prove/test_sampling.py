"""The sampling proof in small: a true rule passes, a lossy one fails, its exact law is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scripts.prove.sampling import (
    SETTINGS,
    Outcome,
    ProofArguments,
    as_markdown,
    chi_square,
    combined,
    exact,
    prove,
    tiny_target,
    verdict,
)


def test_a_setting_and_the_negative_control() -> None:
    name = "all together"
    outcomes = prove(250, seed=0, settings={name: SETTINGS[name]})
    assert verdict(outcomes)
    assert [o.acceptance for o in outcomes] == ["lossless"] * 8 + ["typical"] * 2
    assert [o.rng for o in outcomes[:8]] == ["transformers"] * 4 + ["keyed"] * 4
    assert [o.tokens for o in outcomes] == [2, 3] * 5
    assert all(o.tokens_per_step > 1.02 for o in outcomes)
    # Swapped, the verdict turns: it does depend on what was drawn.
    assert not verdict([*outcomes[:8], replace(outcomes[8], acceptance="lossless")])
    # Trees of one setting draw with seeds of their own, and are no copies of each other.
    assert outcomes[0].statistic != outcomes[2].statistic


def test_many_small_doubts_are_one_large_doubt() -> None:
    case = Outcome("plain", "chain", "lossless", "keyed", 2, 9.0, 5, 0.05, 1.2)
    cases = [case, replace(case, tokens=3, p_value=0.5)] * 12
    assert combined(cases, 2) < 0.001 < combined(cases, 3)
    assert not verdict(cases) and verdict([replace(one, p_value=0.5) for one in cases])


def test_two_and_three_tokens_of_a_case_are_one_row() -> None:
    two = Outcome("plain", "chain", "lossless", "keyed", 2, 9.0, 5, 0.05, 1.2)
    page = as_markdown([two, replace(two, tokens=3, p_value=0.5)], ProofArguments())
    row = "| plain | chain | lossless | keyed | 0.05 (9.0, 5) | 0.5 (9.0, 5) | 1.20 |"
    assert page.splitlines()[-1] == row


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
