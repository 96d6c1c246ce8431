"""What is expected of a source before it was seen, and who pays for finding out."""

from __future__ import annotations

from collections.abc import Sequence

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.situation import BOUNDS, Situation
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
    assert asked[0] > 15 and asked[1] < 10
