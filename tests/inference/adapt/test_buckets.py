"""How many nodes the next step verifies: by what steps took, and what drafts came to."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from medusa_heads.inference.adapt.buckets import Buckets

SIZES = (0, 7, 15)
EXPECTED = [min(0.5 * nodes, 2.0 + 0.02 * nodes) for nodes in range(16)]  # 2.14 and 2.3 of 7 and 15


def taken(
    buckets: Buckets, steps: int, right: float, node: float = 0.02, late: int = 0
) -> Counter[int]:
    """What was verified where so much of what is expected comes true, and each node takes so long
    beside a root."""
    unread: deque[int] = deque()
    sizes: Counter[int] = Counter()
    for _ in range(steps):
        size = buckets.next()
        sizes[size] += 1
        unread.append(size)
        if len(unread) > late:
            read = unread.popleft()
            buckets.learn(read, right * EXPECTED[read], EXPECTED, 1.0 + node * read)
    return sizes


@pytest.mark.parametrize("late", [0, 1])
def test_all_are_made_and_timed_before_any_is_chosen(late: int) -> None:
    buckets = Buckets(SIZES)
    unread: deque[int] = deque()
    for number in range(12):
        size = buckets.next()
        assert size == (15, 7, 0)[number % 3]
        unread.append(size)
        if len(unread) > late:
            read = unread.popleft()
            seconds = 100.0 if number - late < 6 else 1.0 + 0.02 * read
            buckets.learn(read, EXPECTED[read], EXPECTED, seconds)
    # What graphs took to be made and recorded is no time; and of the last one the seconds may be
    # still unread.
    assert taken(buckets, 40, 1.0, late=late)[7] >= 40 - 2 * late


@pytest.mark.parametrize("disturbed", range(4))
def test_a_trial_that_was_interrupted_says_nothing(disturbed: int) -> None:
    """Whichever it was: believed, the size would never be taken, and so never be timed again."""
    buckets = Buckets(SIZES)
    for number in range(12):
        size = buckets.next()
        pause = 50.0 if size == 7 and number // 3 == disturbed else 0.0
        buckets.learn(size, EXPECTED[size], EXPECTED, 1.0 + 0.02 * size + pause)
    assert taken(buckets, 40, 1.0)[7] == 40


def test_more_nodes_where_they_take_no_longer_and_none_where_drafts_are_wrong() -> None:
    assert taken(Buckets(SIZES), 60, 1.0, node=0.0)[15] > 50
    buckets = Buckets(SIZES)
    taken(buckets, 100, 1.0, node=0.1)
    assert taken(buckets, 400, 0.0, node=0.1)[0] > 300
    assert taken(buckets, 400, 1.0, node=0.1)[0] < 40


def test_a_size_that_promises_too_much_is_left_for_one_that_does_not() -> None:
    buckets = Buckets(SIZES)
    sizes: Counter[int] = Counter()
    for _ in range(200):
        size = buckets.next()
        sizes[size] += 1
        buckets.learn(size, {0: 0.0, 7: 2.1, 15: 1.0}[size], EXPECTED, 1.0)
    assert sizes[7] > 120
