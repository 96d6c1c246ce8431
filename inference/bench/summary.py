"""Many timed runs in a few numbers: medians over the prompts, with the quartiles beside them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from medusa_heads.inference.bench.timed_run import Run


def summarise(
    runs: Sequence[Run], reference: Sequence[Run], plain: Sequence[Run] | None = None
) -> dict[str, Any]:
    """What a report says of a method.

    A text that ends sooner takes less time, so batches are compared by their rates; where the
    outputs are equally long that is the ratio of their times.

    Args:
        runs: of the method, one a batch.
        reference: of the method that counts as 1.0, on the same batches.
        plain: whose text is compared with; by default the reference's.
    """
    rates = [run.tokens_per_second for run in runs]
    ratios = [rate / other.tokens_per_second for rate, other in zip(rates, reference, strict=True)]
    same = [
        row == other
        for run, by_plain in zip(runs, reference if plain is None else plain, strict=True)
        for row, other in zip(run.rows, by_plain.rows, strict=True)
    ]
    tokens = sum(run.num_tokens for run in runs)
    summary: dict[str, Any] = {
        "tokens_per_second": statistics.median(rates),
        "speedup": statistics.median(ratios),
        "tokens_per_step": tokens / sum(run.steps for run in runs),
        "identical": sum(same) / len(same),
        "tokens_per_second_quartiles": quartiles(rates),
        "speedup_quartiles": quartiles(ratios),
        "first_token_seconds": statistics.median(run.first_token_seconds for run in runs),
        "tokens": tokens,
        "target_forwards": sum(run.forwards for run in runs),
    }
    for name in ("peak_memory", "run_memory"):
        known = [value for run in runs if (value := getattr(run, name)) is not None]
        if known:
            summary[f"{name}_bytes"] = max(known)
    phases: Counter[str] = Counter()
    accepted: Counter[int] = Counter()
    for run in runs:
        phases.update(run.phases)
        accepted.update(run.accepted)
    if phases:
        summary["seconds_by_phase"] = dict(phases)
        summary["accepted_by_depth"] = accepted_by_depth(accepted)
    return summary


def accepted_by_depth(accepted: Counter[int]) -> list[float]:
    """The share of steps that kept at least 1, 2, .. drafted tokens."""
    steps = sum(accepted.values())
    deepest = max((depth for depth, count in accepted.items() if count), default=0)
    return [
        sum(count for kept, count in accepted.items() if kept >= depth) / steps
        for depth in range(1, deepest + 1)
    ]


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third; of a single value itself."""
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]
