"""What is expected of a source before it was seen, and who pays for finding out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.situation import BOUNDS, FURTHER, Situation
from medusa_heads.inference.drafters.growing import Proposal, Source
from medusa_heads.inference.engine.state import DecodingState

STEEP = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}  # a node takes as long as a step: no draft pays


class Asked(Source):
    """Promises at most a token."""

    def __init__(self, name: str) -> None:
        self.name = name

    def draft(self, state: DecodingState) -> Sequence[Proposal]:
        raise NotImplementedError

    def expected(self, nodes: int) -> float:
        return nodes / (nodes + 3.0)


def situation(**drafting: float) -> Situation:
    sources = [Asked(name) for name in drafting]
    return Situation(Clock(STEEP, drafting, learns=False), (0, 1, 3, 7), 1, 1, sources)


def test_a_source_is_expected_to_lose_no_more_than_asking_it_takes() -> None:
    """Whatever it offers, none of it need be verified."""
    here = situation(cheap=0.1)
    worth = here.budgets[0].worth
    for place in range(len(BOUNDS) + 1):
        assert -0.1 * worth * 1.001 <= here.gains[0][place].values(worth)[1] <= 0.0


def test_a_batch_comes_as_far_as_the_row_that_is_furthest_behind() -> None:
    """Each row as far as it goes itself, where every row takes its own part of a step."""

    def progress(seconds: dict[int, float], more: list[float], written: list[float]) -> float:
        here = Situation(Clock(seconds, learns=False), (0, 1, 3, 7), 4, 4, [])
        more_B1 = np.array([more]).T
        return here.progress(written, more_B1, FURTHER**more_B1)[0]

    flat, steep = {1: 1.0}, {1: 1.0, 8: 8.0}
    alike, ended = [20.0] * 4, [20.0, 20.0, math.inf, 20.0]
    for seconds in (flat, steep):
        assert progress(seconds, [3, 3, 3, 3], alike) == pytest.approx(3.0)
    assert progress(steep, [8, 0, 0, 0], alike) == pytest.approx(2.0)
    one, behind = (
        progress(flat, [8, 0, 0, 0], alike),
        progress(flat, [8, 0, 0, 0], [10, *alike[1:]]),
    )
    assert 0.5 < one < 1.0 and behind > 5.0
    assert progress(flat, [0, 0, 8, 0], ended) == 0.0
    assert progress(flat, [3, 3, 0, 3], ended) == pytest.approx(3.0)


def test_a_row_that_ends_saves_nothing_where_all_rows_stay() -> None:
    """Compiled, every step has all rows: who has ended says nothing of those who go on."""
    here = Situation(Clock(STEEP, learns=False), (0, 1, 3, 7), 4, 4, [], padded=True)
    ended, more_B1 = [20.0, math.inf, math.inf, math.inf], np.array([[3.0, 0.0, 0.0, 0.0]]).T
    assert here.progress(ended, more_B1, FURTHER**more_B1)[0] == pytest.approx(3.0)


def test_a_dear_source_leaves_a_cheap_one_its_trials() -> None:
    here = situation(cheap=0.2, dear=1.0)
    asked = [0, 0]
    for _ in range(400):
        for source, took in ((1, 1.0), (0, 0.2)):
            gains = here.gains[source][0]
            way = gains.pick(1.0)
            gains.learn(way, 0.0, took * way)
            asked[source] += way
        here.grow(1.0)
    assert asked[0] > 10 > asked[1] + 3
