"""A clock that was measured wrongly is set right by the steps that are taken."""

from __future__ import annotations

import pytest

from medusa_heads.inference.adapt.clock import Clock, most_again

MEASURED = {1: 1.0, 4: 1.2, 8: 1.6, 16: 2.4}


def test_between_sizes_on_a_line_and_never_cheaper_beyond_them() -> None:
    clock = Clock(MEASURED)
    assert clock.step(6) == pytest.approx(1.4) and clock.step(8) == 1.6
    assert clock.step(32) == pytest.approx(2.4 + 16 * 0.1)
    disturbed = Clock({1: 1.0, 8: 2.0, 16: 1.5})  # the last one cannot have been so quick
    steps = [disturbed.step(tokens) for tokens in range(16, 200)]
    assert steps == sorted(steps) and steps[-1] > 5 * steps[0]


def test_one_size_stands_for_all() -> None:
    assert Clock({8: 2.0}).step(1) == Clock({8: 2.0}).step(99) == 2.0
    assert Clock.flat().step(1) == Clock.flat().step(64)


def test_a_wrong_prior_is_set_right_within_forty_steps() -> None:
    clock = Clock(MEASURED)
    for _ in range(40):
        for tokens in (1, 8):
            clock.learn(tokens, 3 * MEASURED[tokens])
    for tokens in (1, 8):
        assert clock.step(tokens) == pytest.approx(3 * MEASURED[tokens], rel=0.1)
    for tokens in (4, 16):  # what was not run is at least known to be off the same way
        assert clock.step(tokens) > MEASURED[tokens]


def test_one_wrong_size_is_set_right_alone() -> None:
    clock = Clock(MEASURED)
    for _ in range(60):
        clock.learn(1, 1.0)
        clock.learn(16, 4.8)  # measured as 2.4
    assert clock.step(16) == pytest.approx(4.8, rel=0.1)
    assert clock.step(1) == pytest.approx(1.0, rel=0.1)


def test_an_interrupted_step_moves_it_little() -> None:
    clock = Clock(MEASURED)
    for _ in range(50):
        clock.learn(4, 1.2)
    before = {tokens: clock.step(tokens) for tokens in MEASURED}
    clock.learn(4, 120.0)
    for tokens, seconds in before.items():
        assert seconds <= clock.step(tokens) < 1.1 * seconds


def test_texts_of_another_length_have_a_level_of_their_own() -> None:
    clock = Clock(MEASURED)
    for _ in range(200):
        clock.learn(4, 1.2, context=100)
    for _ in range(200):
        clock.learn(4, 2.4, context=5000)
    assert clock.step(8) > 1.25 * 1.6
    for _ in range(60):
        clock.learn(4, 1.2, context=100)
    assert clock.step(4) == pytest.approx(1.2, rel=0.1)


def test_drafting_moves_slowly_towards_what_it_takes() -> None:
    clock = Clock(MEASURED, {"heads": 0.1})
    assert clock.drafting("heads") == 0.1 and clock.drafting("other") == 0.0
    clock.learn_drafting("heads", 100.0)  # something else had the processor
    assert clock.drafting("heads") < 0.12
    for _ in range(100):
        clock.learn_drafting("heads", 0.2)
    assert clock.drafting("heads") == pytest.approx(0.2, rel=0.05)
    clock.learn_drafting("other", 0.7)
    assert clock.drafting("other") == 0.7


def test_a_first_draft_that_took_far_longer_than_usual_was_interrupted() -> None:
    clock = Clock(MEASURED)
    clock.learn_drafting("heads of 8", 100.0, usual=0.1)
    assert clock.drafting("heads of 8") == pytest.approx(0.3)
    clock.learn_drafting("heads of 4", 0.2, usual=0.1)
    assert clock.drafting("heads of 4") == 0.2


def test_one_that_does_not_learn_stays() -> None:
    clock = Clock(MEASURED, {"heads": 0.1}, learns=False)
    clock.learn(4, 99.0)
    clock.learn_drafting("heads", 99.0)
    assert clock.step(4) == 1.2 and clock.drafting("heads") == 0.1


@pytest.mark.parametrize("measured", [{}, {0: 1.0}, {1: 0.0}, {1: 1.0, 2: -1.0}])
def test_no_times_are_refused(measured: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="a clock needs sizes of at least 1 and times above 0"):
        Clock(measured)


def test_the_cheaper_a_token_the_more_are_read_again() -> None:
    """Found by hand for seconds on a line: steps of five tokens, two of them kept, then one step
    without drafts."""
    most = [most_again(Clock({1: 1.0 + each, 65: 1.0 + 65 * each})) for each in (0.1, 0.01, 0.001)]
    assert most == sorted(most) and most[0] < 4 < most[1] < 20 < most[2]
    assert most_again(Clock.flat()) == 12  # nothing is known
    few_rows = [most_again(Clock({1: 1.01, 65: 1.65}), rows) for rows in (1, 4, 32)]
    assert few_rows == sorted(few_rows, reverse=True) and few_rows[0] > few_rows[2]

    def speed(steps: int) -> float:
        seconds = sum(1 + 0.01 * (5 + 2 * step) for step in range(steps))
        seconds += 1 + 0.01 * (1 + 2 * steps)
        return (2 * steps + 1) / seconds

    assert most[1] == 2 * max(range(1, 33), key=speed) - 1
