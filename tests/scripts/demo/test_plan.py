"""The demo's plan by hand-made speeds: amounts that fit, a floor, and the times announced."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from scripts.demo.plan import (
    FLOOR,
    FULL,
    Amounts,
    Plan,
    Speeds,
    Work,
    from_plain,
    in_words,
    make_plan,
)

WORK = Work(epochs=2, eval_rows=128, writers=2, runs={"float32": 12}, compiles=1)
FAST = Speeds(row_written=0.04, row_read=0.01, row_learnt=0.02, text={"float32": 0.6})


def slower(times: float) -> Speeds:
    text = {dtype: seconds * times for dtype, seconds in FAST.text.items()}
    rows = (FAST.row_written, FAST.row_read, FAST.row_learnt)
    written, read, learnt = (seconds * times for seconds in rows)
    return Speeds(written, read, learnt, text)


def test_a_fast_machine_does_all_of_it() -> None:
    plan = make_plan(slower(0.5), WORK)
    assert plan.amounts == FULL and plan.seconds < 300


@pytest.mark.parametrize("times", [1.1, 1.3, 1.5])
def test_amounts_shrink_to_fit(times: float) -> None:
    plan = make_plan(slower(times), WORK)
    assert FLOOR.rows < plan.amounts.rows < FULL.rows
    assert FLOOR.prompts <= plan.amounts.prompts < FULL.prompts
    assert 280 < plan.seconds <= 300  # whole steps and whole prompts: a little is left
    assert plan.amounts.rows % 16 == 0


def test_the_floor_stands_whatever_it_takes() -> None:
    plan = make_plan(slower(20), WORK)
    assert plan.amounts == FLOOR and plan.seconds > 300


def test_the_slower_the_less() -> None:
    rows = [make_plan(slower(times / 4), WORK).amounts.rows for times in range(1, 40)]
    assert rows == sorted(rows, reverse=True)


def test_times_are_sums_of_the_trials() -> None:
    few, more = Amounts(160, 2), Amounts(320, 4)
    one, two = (make_plan(FAST, WORK, full=each, floor=each) for each in (few, more))
    # Each row is written by one of two processes, read once and learnt twice.
    row = 0.04 / 2 + 0.01 + 2 * 0.02
    assert two.train_seconds - one.train_seconds == pytest.approx(160 * row)
    # Each prompt is continued twelve times, on the average a little faster than plainly.
    assert two.measure_seconds - one.measure_seconds == pytest.approx(2 * 12 * 0.6 * 0.75)
    with_graph = make_plan(FAST, WORK, full=few, floor=few)
    without = replace(WORK, compiles=0)
    assert (
        with_graph.measure_seconds > make_plan(FAST, without, full=few, floor=few).measure_seconds
    )


def test_slow_training_leaves_time_for_fewer_prompts() -> None:
    plan = make_plan(slower(1.1), WORK)
    more, least = plan.amounts.prompts, FLOOR.prompts

    def left(took: float) -> Plan:
        return plan.after_training(took, budget=300, least=least)

    assert left(0.8 * plan.train_seconds).amounts == plan.amounts
    slow = left(1.1 * plan.train_seconds)
    assert slow.amounts.rows == plan.amounts.rows and least < slow.amounts.prompts < more
    assert 285 < slow.seconds <= 300  # measuring is as much slower, and a whole prompt is left out
    assert left(3.0 * plan.train_seconds).amounts.prompts == least
    # What was decided stands.
    assert slow.after_training(slow.train_seconds, budget=300, least=least) == slow
    few = make_plan(FAST, WORK, full=Amounts(160, 2), floor=Amounts(160, 2))
    assert few.after_training(500, budget=300, least=8).amounts.prompts == 2


def test_two_dtypes_are_measured_at_their_own_speeds() -> None:
    work = Work(2, 128, 2, runs={"bfloat16": 12, "float32": 4}, compiles=1)
    texts = {"bfloat16": 0.5, "float32": 1.0}
    one, two = (
        make_plan(Speeds(0.04, 0.01, 0.02, texts), work, full=Amounts(16, n), floor=Amounts(16, n))
        for n in (1, 2)
    )
    added = two.measure_seconds - one.measure_seconds
    assert added == pytest.approx((12 * 0.5 + 4 * 1.0) * 0.75)
    # What is Python's own work does not hang on a dtype whose products are slow.
    slow = make_plan(
        Speeds(0.04, 0.01, 0.02, texts | {"float32": 9.0}), work, full=FLOOR, floor=FLOOR
    )
    fast = make_plan(Speeds(0.04, 0.01, 0.02, texts), work, full=FLOOR, floor=FLOOR)
    assert slow.train_seconds == fast.train_seconds


def test_speeds_on_disk() -> None:
    assert from_plain(asdict(FAST)) == FAST
    bad: list[dict[str, object]] = [
        {"text": {"float32": -1.0}},
        {"text": None},
        {"row_written": "fast"},
        {"row": 1.0},
    ]
    for wrong in (None, {}, *(asdict(FAST) | each for each in bad)):
        assert from_plain(wrong) is None


def test_times_in_words() -> None:
    seconds = (3, 62, 88, 120, 200, 290, 330, 700)
    expected = ["5 seconds", "60 seconds", "1.5 minutes", "2 minutes", "3.5 minutes", "5 minutes"]
    assert [in_words(each) for each in seconds] == [*expected, "6 minutes", "12 minutes"]
    assert Plan(FLOOR, 100, 50).seconds == 150
