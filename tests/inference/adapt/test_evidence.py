"""What was accepted, over what was expected: worked by hand."""

from __future__ import annotations

import pytest

from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level


def test_a_prior_counts_as_much_as_its_weight() -> None:
    evidence = Evidence([0.5, 1.0], weight=4.0, memory=1e9)
    assert evidence.rate(0) == 0.5
    for _ in range(4):
        evidence.learn(0, 1.0)
    assert evidence.rate(0) == pytest.approx((2 + 4) / (4 + 4))
    assert evidence.rate(1) == 1.0  # another group


def test_what_was_expected_is_what_accepted_tokens_are_held_against() -> None:
    evidence = Evidence([1.0], weight=1.0, memory=1e9)
    for place in range(400):
        evidence.learn(0, float(place % 4 == 0), expected=0.25)
    assert evidence.rate(0) == pytest.approx(1.0, abs=0.05)
    for _ in range(400):
        evidence.learn(0, 0.0, expected=0.25)
    assert evidence.rate(0) == pytest.approx(0.5, abs=0.05)


def test_old_drafts_are_forgotten() -> None:
    evidence = Evidence([1.0], memory=50.0)
    for _ in range(1000):
        evidence.learn(0, 1.0)
    for _ in range(150):
        evidence.learn(0, 0.0)
    assert evidence.rate(0) == pytest.approx(0.98**150, abs=0.01)


def test_levels_part_probabilities() -> None:
    assert level(0.0) == 0 and level(1.0) == LEVELS - 1
    assert [level(0.01 * percent) for percent in range(101)] == sorted(
        level(0.01 * percent) for percent in range(101)
    )
    assert {level(0.01 * percent) for percent in range(101)} == set(range(LEVELS))
