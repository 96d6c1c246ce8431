"""The size that gains the most: by hand, where nodes are free, cheap and dear."""

from __future__ import annotations

import pytest

from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock

SIZES = (0, 1, 3, 7)
EXPECTED = [0.0, 0.6, 0.9, 1.1, 1.2, 1.25, 1.28, 1.3]  # accepted tokens by nodes


def budget(clock: Clock, rows: int = 1) -> Budget:
    return Budget(clock, SIZES, rows)


def test_free_nodes_are_all_verified() -> None:
    free = budget(Clock.flat())
    assert free.best(EXPECTED)[0] == 7 and free.least() == 0.0


def test_drafts_that_do_not_pay_are_left_out() -> None:
    # Every node takes as long as a token: at best 0.6 tokens for a step.
    dear = budget(Clock({1: 1.0, 2: 2.0, 8: 8.0}, learns=False))
    size, value = dear.best(EXPECTED)
    assert size == 0 and value == pytest.approx(-1.0)
    assert dear.least() > 0.5


def test_nodes_are_verified_while_they_gain_more_than_they_take() -> None:
    # A node takes a tenth of a step, and a second is worth a token.
    some = budget(Clock({1: 1.0, 11: 2.0}, learns=False))
    gains = {size: EXPECTED[size] - some.seconds(size) for size in SIZES}
    assert gains == pytest.approx({0: -1.0, 1: -0.5, 3: -0.2, 7: -0.4})
    size, value = some.best(EXPECTED)
    assert size == 3 and value == pytest.approx(-0.2)


def test_a_second_is_worth_more_where_more_was_accepted() -> None:
    some = budget(Clock({1: 1.0, 11: 2.0}, learns=False))
    assert some.worth == pytest.approx(1.0)
    for _ in range(400):
        some.learn(4.0, 1.0)
    assert some.worth == pytest.approx(4.0, rel=0.01)
    assert some.best(EXPECTED)[0] < 3  # a node must gain 0.4 now
    for _ in range(400):
        some.learn(0.5, 1.0)
    assert some.worth == 1.0  # never less than plain decoding makes of it


def test_more_rows_share_what_pays() -> None:
    alone, many = (budget(Clock({1: 1.0, 11: 1.1, 88: 8.0}, learns=False), n) for n in (1, 8))
    assert alone.best(EXPECTED)[0] == 7 and many.best(EXPECTED)[0] < 7


def test_padded_sizes_take_their_whole_time() -> None:
    clock = Clock({1: 1.0, 2: 1.1, 8: 2.0}, learns=False)
    padded = Budget(clock, [0, 7], padded=True)
    assert padded.best([0.0, 1.1])[0] == 7  # six of them spare: 1.1 tokens for a second more
    assert padded.best([0.0, 0.9])[0] == 0
    assert Budget(clock, [0, 7]).best([0.0, 0.9])[0] == 1
    single = Budget(clock, [7], padded=True)
    assert single.best(EXPECTED)[0] == single.best([0.0])[0] == 7
