"""Many runs in a few numbers."""

from __future__ import annotations

from collections import Counter

import pytest

from medusa_heads.inference.bench.timed_run import TimedRun, accepted_by_depth, summarise


def test_medians_are_of_rates_and_of_ratios_prompt_by_prompt() -> None:
    def run(token: int, count: int, seconds: float, steps: int) -> TimedRun:
        return TimedRun([[token] * count], seconds, steps, steps)

    plain = [run(1, 10, 1.0, 10), run(2, 10, 2.0, 10), run(3, 10, 5.0, 10)]
    fast = [run(1, 10, 0.5, 4), run(2, 10, 2.0, 5), run(4, 5, 0.5, 1)]
    summary = summarise(fast, plain)
    assert summary["tokens_per_second"] == 10.0  # of 20, 5, 10
    assert summary["speedup"] == 2.0  # of 2, 1, 5
    assert summary["tokens_per_step"] == 25 / 10  # totals, then the ratio
    assert summary["identical"] == pytest.approx(2 / 3)
    assert summary["speedup_quartiles"] == [1.5, 3.5]


def test_accepted_by_depth() -> None:
    assert accepted_by_depth(Counter({0: 2, 1: 1, 3: 1})) == [0.5, 0.25, 0.25]
    assert accepted_by_depth(Counter({0: 2, 4: 0})) == []
