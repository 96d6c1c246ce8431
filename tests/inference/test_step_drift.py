"""Step times that are learnt, on machines whose times are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import log

import numpy as np
import pytest
import torch

from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.inference.step_drift import StepDrift
from medusa_heads.prefix_tree import PrefixTree

SIZES = (0, 1, 3, 7, 15, 31, 63)
Machine = Callable[[int], float]


def machine(nodes: int) -> float:
    return 0.02 * (1 + nodes / 30)


def far_on(nodes: int) -> float:
    """At a long context: a higher level, and a steeper slope."""
    return 0.04 * (1 + nodes / 12)


def after(
    measured: Sequence[float],
    seconds: Machine,
    taken: Sequence[int],
    steps: int,
    noise: Callable[[random.Random], float] = lambda chance: chance.gauss(0, 0.08),
) -> StepDrift:
    drift, chance = StepDrift(SIZES, measured), random.Random(0)
    for _ in range(steps):
        nodes = chance.choice(taken)
        drift.learn(nodes, seconds(nodes) * np.exp(noise(chance)))
    return drift


def off(drift: StepDrift, seconds: Machine) -> list[float]:
    """By how much the logarithm of each size is off."""
    return [log(drift.seconds()[i] / seconds(size)) for i, size in enumerate(SIZES)]


def test_what_was_measured_stands_until_a_step_says_otherwise() -> None:
    measured = [machine(size) for size in SIZES]
    assert StepDrift(SIZES, measured).seconds() == pytest.approx(measured)
    right = after(measured, machine, (1, 3, 7), 300)
    assert max(map(abs, off(right, machine))) < 0.06


@pytest.mark.parametrize("factor", [3.0, 1 / 3, 30.0])
def test_a_level_is_learnt_in_few_steps_for_all_sizes(factor: float) -> None:
    drift = after([factor * machine(size) for size in SIZES], machine, (3, 7), 20)
    assert max(map(abs, off(drift, machine))) < 0.15


def test_sizes_between_those_measured_teach_both() -> None:
    drift = after([2 * machine(size) for size in SIZES], machine, (2, 5, 11, 25), 200)
    assert max(map(abs, off(drift, machine)[1:5])) < 0.08


def test_sizes_that_are_not_taken_are_corrected_too() -> None:
    measured = [machine(size) for size in SIZES]
    before = StepDrift(SIZES, measured)
    drift = after(measured, far_on, (0, 1, 3, 7), 200)
    for size in (4, 5, 6):
        assert abs(off(drift, far_on)[size]) < 0.4 * abs(off(before, far_on)[size])


def test_interrupted_steps_say_little() -> None:
    def interrupted(chance: random.Random) -> float:
        return log(40) if chance.random() < 0.04 else chance.gauss(0, 0.08)

    measured = [machine(size) for size in SIZES]
    drift = after(measured, machine, (1, 3, 7), 400, interrupted)
    assert max(map(abs, off(drift, machine))) < 0.12


def test_what_has_changed_is_forgotten() -> None:
    drift = after([machine(size) for size in SIZES], far_on, (0, 3, 15), 400)
    for step in range(100):
        size = (0, 3, 15)[step % 3]
        drift.learn(size, machine(size))
    assert max(map(abs, off(drift, machine)[:5])) < 0.12


def test_more_nodes_never_cost_less() -> None:
    drift = StepDrift(SIZES, [machine(size) for size in SIZES])
    for _ in range(50):
        drift.learn(7, 0.5 * machine(7))
        drift.learn(3, 1.5 * machine(3))
    assert (np.diff(drift.seconds()) >= 0).all()


def test_doubt_goes_with_what_was_seen_and_comes_back() -> None:
    drift = StepDrift(SIZES, [machine(size) for size in SIZES])
    doubts = [drift.doubt(3, 4)]
    for nodes, steps in ((7, 30), (15, 30), (1, 2000)):
        for _ in range(steps):
            drift.learn(nodes, machine(nodes))
        doubts.append(drift.doubt(3, 4))
    assert doubts[0] > doubts[1] > 2 * doubts[2] and doubts[3] > 1.5 * doubts[2]


@pytest.mark.parametrize("sizes", [(5,), (0,)], ids=str)
def test_a_single_size(sizes: tuple[int]) -> None:
    drift = StepDrift(sizes, [1.0])
    for nodes in (0, 5, 9) * 20:
        drift.learn(nodes, 2.0)
    assert drift.seconds() == pytest.approx([2.0], rel=0.05)


def decoded(costs: StepCosts, seconds: Machine, steps: int) -> float:
    """Seconds a token of a text whose drafts are always a bushy tree of the same promise."""
    chance, spent, tokens = random.Random(1), 0.0, 0.0
    for _ in range(steps):
        tree = PrefixTree(0)
        for path in range(3):
            tree.add_path(
                range(10 * path, 10 * path + 10), [0.7 / (1 + path) * 0.8**i for i in range(10)]
            )
        cut, promised = costs.cut([tree], torch.device("cpu"))
        nodes = cut.num_nodes - 1
        spent += seconds(nodes)
        tokens += 1 + promised
        costs.took(nodes, seconds(nodes) * np.exp(chance.gauss(0, 0.08)))
    return spent / tokens


@pytest.mark.parametrize(
    "wrong",
    [
        lambda size: 1.0,
        lambda size: 3.0 if size >= 7 else 1.0,
        lambda size: 1 / 3 if size >= 7 else 1.0,
        lambda size: 3.0,
    ],
    ids=["right", "too slow from 7 on", "too fast from 7 on", "too slow"],
)
def test_a_wrong_measurement_is_made_up_for(wrong: Machine) -> None:
    best = decoded(StepCosts({size: machine(size) for size in SIZES}), machine, 1)
    costs = StepCosts({size: wrong(size) * machine(size) for size in SIZES}, learns=True)
    decoded(costs, machine, 1000)
    assert decoded(costs, machine, 300) < 1.02 * best


def test_a_size_that_is_thought_too_slow_is_tried() -> None:
    measured = {size: machine(size) * (3.0 if size >= 7 else 1.0) for size in SIZES}
    costs = StepCosts(measured, learns=True)
    decoded(costs, machine, 250)
    assert costs.seconds(7) < 2 * machine(7)


def test_last_rows_are_waited_for_whatever_is_learnt() -> None:
    costs = StepCosts({0: 1.0, 3: 1.2}, waits=1.5, learns=True)
    assert [costs.seconds(0), costs.seconds(3)] == pytest.approx([1.0, 1.8])
    for _ in range(200):
        costs.took(0, 2.0)
        costs.took(3, 2.4)
    assert [costs.seconds(0), costs.seconds(3)] == pytest.approx([2.0, 3.6], rel=0.02)


def test_costs_that_are_no_times_learn_nothing() -> None:
    costs = StepCosts.of_size(5)
    costs.took(3, 0.01)
    assert costs.seconds(3) == 1.0
