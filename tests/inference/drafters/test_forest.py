"""Trees that stop growing where no more nodes can pay: what is verified is that of whole trees."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.situation import FURTHER, Situation
from medusa_heads.inference.drafters.forest import grown
from medusa_heads.inference.drafters.growing import Growing
from tests.inference.drafters.test_growing import Table, Tabled

SIZES = (0, 1, 3, 7, 11, 15, 23)


def table(chance: random.Random) -> Table:
    """A chain of a few tokens, sure or not, and guesses beside it and behind them."""
    found: Table = {}
    sure, path = chance.choice([0.2, 0.6, 0.95]), tuple[int, ...]()
    for _ in range(chance.randint(0, 12)):
        others = {token: chance.random() * (1 - sure) / 2 for token in (5, 6, 7)}
        found[path] = {4: sure * chance.uniform(0.8, 1.0)} | others
        found |= {(*path, token): {8: chance.random() * 0.5} for token in others}
        path = (*path, 4)
    return found


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("padded", [False, True])
def test_what_is_verified_is_that_of_whole_trees(rows: int, padded: bool) -> None:
    chance, saved, sizes = random.Random(rows), 0, set()
    for _ in range(60):
        tables = [table(chance) for _ in range(rows)]
        # Dear or cheap, and of any shape: what was measured of a size may be off.
        slope = chance.choice([0.0, 0.01, 0.03, 0.1]) / rows
        numbers = {1, *(rows * (size + 1) for size in (0, *SIZES, 2, 5))}
        clock = Clock({n: (1 + slope * n) * chance.uniform(0.9, 1.1) for n in numbers})
        here = Situation(clock, SIZES, rows, rows, [], padded=padded)
        budget: Budget = here.budgets[0]
        written = [float(chance.randint(0, 6)) for _ in range(rows)]
        written[-1] = math.inf if chance.random() < 0.2 and rows > 1 else written[-1]

        def growing(tables: list[Table] = tables) -> list[Growing]:
            return [Growing(9, [Tabled(each)], 23, 0.01, further=FURTHER) for each in tables]

        whole = growing()
        for each in whole:
            each.to(23)
        longest = max(len(each.tree) for each in whole)
        more_BX, nearer_BX = (
            np.array([row + row[-1:] * (longest - len(row)) for row in lists])
            for lists in zip(
                *((each.tree.expected, each.tree.nearer) for each in whole), strict=True
            )
        )
        expected: list[float] = more_BX[0].tolist()
        if rows > 1:
            expected = here.progress(written, more_BX, 1 - (1 - FURTHER) * nearer_BX)
        best, _ = budget.best(expected)
        draft = grown(growing(), budget, here.pace(written))
        assert draft.size == best
        assert draft.expected == pytest.approx(expected[min(best, longest - 1)])
        for tree, each in zip(draft.trees, whole, strict=True):
            assert tree.tokens[: best + 1] == each.tree.tokens[: best + 1]
            assert tree.parents[: best + 1] == each.tree.parents[: best + 1]
            saved += len(each.tree) - len(tree)
        sizes.add(best)
    assert saved > 60 and len(sizes) > 2
