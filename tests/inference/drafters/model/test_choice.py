"""The choice among draft models with known gains: the best one drafts, trials are bounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters.model.choice import DraftChoice

PLAIN = Clock({1: 1.0}, learns=False)
PRIOR = (2.0, 1.2)


class World:
    """Draft models with known gains: tokens a step, drawn, and seconds a step.

    Args:
        reading: seconds of a token that was missed, of each draft model.
        prompt, new: tokens of each text.
    """

    def __init__(self, reading: Sequence[float], *, prompt: int, new: int) -> None:
        self.choice = DraftChoice(PLAIN, 4, 1, [PRIOR] * len(reading))
        self.coins = torch.Generator().manual_seed(0)
        self.reading, self.prompt, self.new = reading, prompt, new
        self.length, self.read = 0, [0] * len(reading)
        self.steps = [0] * (len(reading) + 1)  # first those without a draft
        self.tokens = self.seconds = 0.0

    def run(self, count: int, chances: Sequence[float], seconds: Sequence[float]) -> float:
        """Tokens a second of so many steps; each of the 4 drafted tokens is kept with a chance."""
        before = self.tokens, self.seconds
        for _ in range(count):
            if self.length == 0:
                self.read = [0] * len(self.reading)
                self.length = self.prompt
            missed = [self.length - read for read in self.read]
            prices = [0.0] + [a * b for a, b in zip(missed, self.reading, strict=True)]
            way = self.choice.pick(prices, self.length - self.prompt)
            kept, took = 0, 1.0
            if way:
                while kept < 4 and torch.rand((), generator=self.coins) < chances[way - 1]:
                    kept += 1
                took = seconds[way - 1]
                # What a draft model's tokens are, it need not read again.
                self.read[way - 1] = self.length + kept + 1
            self.choice.learn(kept + 1, took)
            self.steps[way] += 1
            self.seconds += took + prices[way]
            self.tokens += kept + 1
            self.length += kept + 1
            if self.length > self.prompt + self.new:
                self.length = 0
        return (self.tokens - before[0]) / (self.seconds - before[1])


def expected(chance: float, seconds: float) -> float:
    return (1 - chance**5) / (1 - chance) / seconds


def test_trials_are_bounded() -> None:
    """Three draft models, of which the second is the best by far."""
    chances, seconds = [0.3, 0.85, 0.6], [1.2, 1.3, 1.25]
    best = max(map(expected, chances, seconds))
    world = World([0.002] * 3, prompt=100, new=400)
    assert world.run(300, chances, seconds) > 0.85 * best  # it knew nothing
    assert world.run(2000, chances, seconds) > 0.96 * best
    assert world.steps[2] > 0.9 * sum(world.steps)


def test_drafts_that_do_not_pay_cost_next_to_nothing() -> None:
    world = World([0.002] * 2, prompt=100, new=400)
    assert world.run(300, [0.1, 0.2], [1.5, 1.6]) > 0.88  # it knew nothing
    assert world.run(2000, [0.1, 0.2], [1.5, 1.6]) > 0.97
    assert world.steps[0] > 0.9 * sum(world.steps) and min(world.steps) > 5


def test_another_text_has_another_best() -> None:
    world, seconds = World([0.002] * 2, prompt=100, new=400), [1.2, 1.2]
    for chances in ([0.8, 0.3], [0.3, 0.8], [0.8, 0.3]):
        world.run(500, chances, seconds)  # time to notice
        best = max(map(expected, chances, seconds))
        assert world.run(1000, chances, seconds) > 0.95 * best


def test_what_must_be_read_first_is_counted() -> None:
    """A long prompt is not read for a trial before there is time to spare."""
    chances, seconds = [0.5, 0.9], [1.2, 1.2]
    long = World([0.0, 0.01], prompt=4000, new=10**6)
    long.run(100, chances, seconds)
    assert long.steps[2] == 0
    long.run(4000, chances, seconds)
    assert long.steps[2] > 2000
    # Where every text is short, and its prompt long, the reading is never made up for.
    short = World([0.0, 0.01], prompt=4000, new=50)
    short.run(4000, chances, seconds)
    assert short.steps[2] < 200
