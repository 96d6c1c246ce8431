"""A better way is found, a bad one is rare, and trials lose no more than their share of seconds."""

from __future__ import annotations

import pytest

from medusa_heads.inference.adapt import bandit as module
from medusa_heads.inference.adapt.bandit import Allowance, Bandit

PLAIN = (1.0, 1.0)  # a token a second


def run(
    bandit: Bandit, allowance: Allowance, truth: list[tuple[float, float]], n: int
) -> list[int]:
    """The ways that were gone, with these tokens and seconds each."""
    gone = []
    for _ in range(n):
        tokens, seconds = zip(*truth, strict=True)
        way = bandit.pick(max(t / s for t, s in zip(tokens, seconds, strict=True)))
        bandit.learn(way, *truth[way])
        allowance.grow(truth[way][1])
        gone.append(way)
    return gone


@pytest.mark.parametrize("prior", [(0.5, 1.0), (1.0, 1.3), (3.0, 1.0)])
def test_the_better_way_is_found_whatever_was_believed(prior: tuple[float, float]) -> None:
    allowance = Allowance(1.0)
    gone = run(Bandit([PLAIN, prior], allowance), allowance, [PLAIN, (2.0, 1.1)], 600)
    assert sum(gone[300:]) > 270


def test_a_bad_way_stays_rare_and_loses_no_more_than_its_share() -> None:
    allowance = Allowance(1.0)
    bad = (0.2, 1.5)
    gone = run(Bandit([PLAIN, bad], allowance), allowance, [PLAIN, bad], 4000)
    lost = sum(gone) * (bad[1] - bad[0])  # seconds, where a second is worth a token
    assert 0 < lost <= module.SHARE * (4000 + sum(gone) * 0.5) + 3.0 + 1.3


def test_a_way_that_was_thought_good_is_left() -> None:
    allowance = Allowance(1.0)
    gone = run(Bandit([PLAIN, (3.0, 1.0)], allowance), allowance, [PLAIN, (0.5, 1.0)], 400)
    assert gone[0] == 1 and sum(gone[100:]) < 30


def test_doing_nothing_needs_no_trial() -> None:
    """What it gains is known, so that no step is spent on finding out."""
    tried = []
    for idle in (True, False):
        bandit = Bandit([(0.0, 0.0), (0.1, 0.05)], Allowance(1.0), idle=idle)
        ways = []
        for _ in range(80):
            ways.append(bandit.pick(1.0))
            bandit.learn(ways[-1], 0.1 * ways[-1], 0.05 * ways[-1])
        tried.append(ways.count(0))
    assert tried[0] == 0 and tried[1] > 20


def test_a_bad_way_that_becomes_good_is_noticed() -> None:
    allowance = Allowance(1.0)
    bandit = Bandit([PLAIN, (0.5, 1.0)], allowance)
    run(bandit, allowance, [PLAIN, (0.5, 1.0)], 1500)
    gone = run(bandit, allowance, [PLAIN, (3.0, 1.0)], 3000)
    assert sum(gone[-500:]) > 450


def test_prices_count_where_they_stand() -> None:
    bandit = Bandit([PLAIN, (1.5, 1.0)], Allowance(1e-9))
    assert bandit.pick(1.0) == 1
    assert bandit.pick(1.0, prices=[0.0, 0.6]) == 0
    assert bandit.values(1.0) == pytest.approx([0.0, 0.5])


def test_an_allowance_pays_what_it_has() -> None:
    allowance = Allowance(1.0)
    assert allowance.pay(2.0) and not allowance.pay(2.0) and allowance.pay(1.0)
    allowance.grow(100.0)
    assert not allowance.pay(100 * module.SHARE + 0.01) and allowance.pay(100 * module.SHARE)
    allowance.grow(1e9)
    assert not allowance.pay(module._MOST_SAVED + 0.01)  # no more than that is saved
    assert allowance.pay(-5.0) and allowance.pay(module._MOST_SAVED)


def test_what_is_owed_is_soon_forgotten() -> None:
    """An interrupted trial took longer than any trial does."""
    allowance = Allowance(1.0)
    allowance.owe(1e9)
    allowance.grow(module._MOST_SAVED / module.SHARE + 1.0)
    assert allowance.pay(0.0)
