"""The choice among draft models with known gains: the best one drafts, trials are bounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medusa_heads.inference.draft_costs import DraftCosts
from medusa_heads.inference.drafters.draft_choice import DraftChoice

STEP = [1.0 + 0.02 * n for n in range(9)]
SMALL = DraftCosts(STEP, first=0.05, further=0.05, reading=0.002)


class World:
    """Draft models with known gains: tokens a step, drawn, and seconds a step."""

    def __init__(self, costs: Sequence[DraftCosts], *, prompt: int, new: int) -> None:
        self.choice, self.costs = DraftChoice(costs), costs
        self.coins = torch.Generator().manual_seed(0)
        self.prompt, self.new = prompt, new
        self.length, self.read = 0, [0] * len(costs)
        self.steps = [0] * len(costs)
        self.tokens = self.seconds = 0.0

    def run(self, count: int, chances: Sequence[float], seconds: Sequence[float]) -> float:
        """Tokens a second of so many steps; each of the 4 drafted tokens is kept with a chance."""
        before = self.tokens, self.seconds
        for _ in range(count):
            if self.length == 0:
                self.choice.begin_text()
                self.read = [0] * len(self.costs)
                self.length = self.prompt
            unread = [self.length - read for read in self.read]
            which = self.choice.pick(unread, self.length - self.prompt)
            kept = 0
            while kept < 4 and torch.rand((), generator=self.coins) < chances[which]:
                kept += 1
            self.choice.learn(which, kept + 1, seconds[which])
            self.steps[which] += 1
            self.read[which] = self.length
            self.seconds += seconds[which] + unread[which] * self.costs[which].reading
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
    world = World([SMALL] * 3, prompt=100, new=400)
    assert world.run(300, chances, seconds) > 0.85 * best  # it knew nothing
    assert world.run(2000, chances, seconds) > 0.96 * best
    assert world.steps[1] > 0.9 * sum(world.steps) and min(world.steps) >= 12


def test_another_text_has_another_best() -> None:
    world, seconds = World([SMALL] * 2, prompt=100, new=400), [1.2, 1.2]
    for chances in ([0.8, 0.3], [0.3, 0.8], [0.8, 0.3]):
        world.run(500, chances, seconds)  # time to notice
        best = max(map(expected, chances, seconds))
        assert world.run(1000, chances, seconds) > 0.95 * best


def test_what_must_be_read_first_is_counted() -> None:
    """A long prompt is not read for a trial before there is time to spare."""
    slow = DraftCosts(STEP, first=0.05, further=0.05, reading=0.01)
    chances, seconds = [0.5, 0.9], [1.2, 1.2]
    long = World([SMALL, slow], prompt=4000, new=10**6)
    long.run(100, chances, seconds)
    assert long.steps == [100, 0]
    long.run(4000, chances, seconds)
    assert long.steps[1] > 2000
    # Where every text is short, and its prompt long, the reading is never made up for.
    short = World([SMALL, slow], prompt=4000, new=50)
    short.run(4000, chances, seconds)
    assert short.steps[0] > 3800
