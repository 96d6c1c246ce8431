"""One timed generation, whoever generates, with the target's forwards counted from outside; and
many of them in a few numbers.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from medusa_heads.data.prompts import left_padded, stop_ids, until_end
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.machine.devices import wait_for
from medusa_heads.machine.memory import PeakMemory

WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Method:
    """A way to decode; `stats` and `nodes` are of methods of this engine."""

    name: str  # what tables call it
    generate: Callable[..., Any]  # transformers' signature; returns the sequences [B, T]
    stats: Callable[[], GenerationStats] | None = None  # what the last call did
    nodes: Callable[[], int] | None = None  # the most tokens drafted at a step
    one_row: bool = False  # it decodes one sequence at a time
    compiled: bool = False  # its forwards cannot be counted from outside


@dataclass
class TimedRun:
    """One method on one batch of prompts; `phases` and `accepted` are of methods of this engine."""

    rows: list[list[int]]  # the tokens written behind each prompt, up to the end token
    seconds: float  # wall time
    forwards: int  # of the target
    steps: int  # forwards that each row took part in, summed over the rows
    first_token_seconds: float = 0.0  # wall time until the target's first forward was done
    peak_memory: int | None = None  # bytes held at most, by everything in the process
    run_memory: int | None = None  # bytes of it that were not held before the run
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    # How often a step kept 0, 1, 2, .. drafted tokens, the prompts' own forwards left out.
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def run_once(
    method: Method, model: Any, prompts: Sequence[Sequence[int]], seed: int, **generate_kwargs: Any
) -> TimedRun:
    """One timed generation of a batch, padded on the left, seeded; what it runs of the target is
    counted from outside, but for methods of this engine, which say it."""
    pad = generate_kwargs.get("pad_token_id") or 0
    input_ids_BT, mask_BT = left_padded(prompts, pad, model.device)
    ends: list[float] = []  # of the target's forwards

    def count(*_: Any) -> None:
        if not ends:
            wait_for(model.device)
            if method.compiled:  # nothing of ours is compiled into the others
                hook.remove()
        ends.append(time.perf_counter())

    torch.manual_seed(seed)
    memory = PeakMemory(model.device)
    with model.register_forward_hook(count) as hook:
        wait_for(model.device)
        started = time.perf_counter()
        output_BT = method.generate(input_ids_BT, attention_mask=mask_BT, **generate_kwargs)
        wait_for(model.device)
        seconds = time.perf_counter() - started
    peak, above = memory.read()
    texts, stops = output_BT[:, input_ids_BT.shape[1] :].tolist(), stop_ids(model)
    rows = [until_end(tokens, stops) for tokens in texts]
    first = ends[0] if ends else 0.0
    run = TimedRun(rows, seconds, len(ends), len(ends), first - started, peak, above)
    if method.compiled:
        run.forwards = max(map(len, rows))  # plain: a token a forward
    if method.stats is not None:
        stats = method.stats()
        # A script's forwards pass by the module, and so do compiled ones; others draft through it.
        run.forwards = stats.forwards
        run.steps = stats.steps
        run.phases = dict(stats.seconds) | {"other": seconds - sum(stats.seconds.values())}
        run.accepted = stats.accepted - Counter({0: len(rows)})
    elif method.compiled or len(rows) > 1:
        run.steps = sum(map(len, rows))  # plain: a token a step
    return run


def take_turns(
    methods: Sequence[Method],
    model: Any,
    batches: Sequence[Sequence[Sequence[int]]],
    seed: int,
    on_run: Callable[[], object] = lambda: None,
    **generate_kwargs: Any,
) -> dict[str, list[TimedRun]]:
    """Every method on every batch of prompts, in an order that rotates: its runs, by its name.
    Batch i is sampled from `seed + i` by all; `on_run` is called after each run."""
    runs: dict[str, list[TimedRun]] = {method.name: [] for method in methods}
    for index, prompts in enumerate(batches):
        first = index % len(methods)
        for method in [*methods[first:], *methods[:first]]:
            done = run_once(method, model, prompts, seed + index, **generate_kwargs)
            runs[method.name].append(done)
            on_run()
    return runs


def fastest_threads(model: Any, prompt: Sequence[int], most_tokens: int = WARM_UP_TOKENS) -> int:
    """One thread or all that torch would use, whichever decodes plainly the faster: the forward of
    one token of a small model is over before a second thread has woken up. Behind the prompt there
    is room for `most_tokens`."""
    most = torch.get_num_threads()
    if model.device.type != "cpu" or most == 1:
        return most
    method, how = Method("plain", model.generate), {"do_sample": False, "use_cache": True}
    new = min(WARM_UP_TOKENS, most_tokens)
    seconds: dict[int, list[float]] = {1: [], most: []}
    for _ in range(4):
        for count, times in seconds.items():
            torch.set_num_threads(count)
            done = run_once(method, model, [prompt], 0, max_new_tokens=new, **how)
            times.append(done.seconds / done.num_tokens)
    return min(seconds, key=lambda count: statistics.median(seconds[count][1:]))


def summarise(
    runs: Sequence[TimedRun], reference: Sequence[TimedRun], plain: Sequence[TimedRun] | None = None
) -> dict[str, Any]:
    """What a report says of a method, from its runs of all batches. Those of `reference` count as
    1.0, and its text is compared with that of `plain`, or else of the reference. A text that ends
    sooner takes less time, so batches are compared by their rates; where the outputs are equally
    long that is the ratio of their times."""
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
        "tokens_per_second_quartiles": _quartiles(rates),
        "speedup_quartiles": _quartiles(ratios),
        "first_token_seconds": statistics.median(run.first_token_seconds for run in runs),
        "tokens": tokens,
        "target_forwards": sum(run.forwards for run in runs),
    }
    for name in ("peak_memory", "run_memory"):
        known = [value for run in runs if (value := getattr(run, name)) is not None]
        if known:
            summary[f"{name}_bytes"] = max(known)
    phases: Counter[str] = Counter()
    for run in runs:
        phases.update(run.phases)
    if phases:
        summary["seconds_by_phase"] = dict(phases)
        accepted = sum((run.accepted for run in runs), Counter[int]())
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


def _quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third; of a single value itself."""
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]
