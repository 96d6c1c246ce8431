"""One timed generation, whoever generates, with the target's forwards counted from outside.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from medusa_heads.inference.bench.peak_memory import PeakMemory
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.prompts import left_padded, stop_ids

WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        name: what tables call it.
        generate: transformers' signature; returns the sequences [B, T].
        stats: what the last call did, of methods of this engine.
        nodes: the most tokens drafted at a step, of methods of this engine.
        one_row: it decodes one sequence at a time.
        compiled: its forwards cannot be counted from outside.
    """

    name: str
    generate: Callable[..., Any]
    stats: Callable[[], GenerationStats] | None = None
    nodes: Callable[[], int] | None = None
    one_row: bool = False
    compiled: bool = False


@dataclass
class Run:
    """One method on one batch of prompts.

    Attributes:
        rows: the tokens written behind each prompt, up to the end token.
        seconds: wall time.
        forwards: of the target.
        steps: forwards that each row took part in, summed over the rows.
        first_token_seconds: wall time until the target's first forward was done.
        peak_memory: bytes held at most while it ran, by everything in the process.
        run_memory: bytes of it that were not held before the run.
        phases: seconds by phase, and accepted: how often a step kept 0, 1, 2, .. drafted tokens,
            the prompts' own forwards left out; of methods of this engine.
    """

    rows: list[list[int]]
    seconds: float
    forwards: int
    steps: int
    first_token_seconds: float = 0.0
    peak_memory: int | None = None
    run_memory: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def run_once(
    method: Method, model: Any, prompts: Sequence[Sequence[int]], seed: int, **generate_kwargs: Any
) -> Run:
    """One timed generation of a batch, padded on the left, seeded; what it runs of the target is
    counted from outside."""
    pad = generate_kwargs.get("pad_token_id") or 0
    input_ids_BT, mask_BT = left_padded(prompts, pad, model.device)
    longest = input_ids_BT.shape[1]
    torch.manual_seed(seed)
    memory = PeakMemory(model.device)
    with _forwards(model, first_alone=method.compiled) as forwards:
        _synchronize(model)
        started = time.perf_counter()
        output_BT = method.generate(input_ids_BT, attention_mask=mask_BT, **generate_kwargs)
        _synchronize(model)
        seconds = time.perf_counter() - started
    peak, above = memory.read()
    rows = [_up_to_the_end(row, model) for row in output_BT[:, longest:].tolist()]
    run = Run(rows, seconds, forwards.count, forwards.count, forwards.first - started, peak, above)
    if method.compiled:
        run.forwards = max(map(len, rows))  # plain: a token a forward
    if method.stats is not None:
        stats = method.stats()
        if method.compiled:
            run.forwards = stats.forwards
        run.steps = stats.steps
        run.phases = dict(stats.seconds) | {"other": seconds - sum(stats.seconds.values())}
        run.accepted = stats.accepted - Counter({0: len(rows)})
    elif method.compiled or len(rows) > 1:
        run.steps = sum(map(len, rows))  # plain: a token a step
    return run


def fastest_threads(model: Any, prompt: Sequence[int]) -> int:
    """One thread or all that torch would use, whichever decodes plainly the faster: the forward of
    one token of a small model is over before a second thread has woken up."""
    most = torch.get_num_threads()
    if model.device.type != "cpu" or most == 1:
        return most
    method = Method("plain", model.generate)
    seconds: dict[int, list[float]] = {1: [], most: []}
    for _ in range(4):
        for count, times in seconds.items():
            torch.set_num_threads(count)
            done = run_once(
                method, model, [prompt], 0, max_new_tokens=WARM_UP_TOKENS, do_sample=False
            )
            times.append(done.seconds / done.num_tokens)
    return min(seconds, key=lambda count: statistics.median(seconds[count][1:]))


def _up_to_the_end(tokens: list[int], model: Any) -> list[int]:
    """A row without what fills it up to the longest row of its batch."""
    ends = stop_ids(model)
    last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


@dataclass
class _Forwards:
    count: int = 0
    first: float = 0.0  # when the first was done


@contextmanager
def _forwards(model: Any, *, first_alone: bool) -> Iterator[_Forwards]:
    """Count the target's forwards within the block, whoever asks for them.

    Args:
        model: the target.
        first_alone: count no other, so that nothing of ours is compiled into those.
    """
    seen = _Forwards()

    def count(*_: Any) -> None:
        if seen.count == 0:
            _synchronize(model)
            seen.first = time.perf_counter()
            if first_alone:
                hook.remove()
        seen.count += 1

    hook = model.register_forward_hook(count)
    try:
        yield seen
    finally:
        hook.remove()


def _synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
