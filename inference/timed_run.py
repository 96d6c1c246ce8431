"""One timed generation, whoever generates, with the target's forwards counted from outside.

Shapes: T tokens.
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

from medusa_heads.inference.stats import GenerationStats

WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Method:
    """A way to decode: `generate` has transformers' signature and returns the sequences [1, T]."""

    name: str
    generate: Callable[..., Any]
    stats: Callable[[], GenerationStats] | None = None


@dataclass
class Run:
    """One method on one prompt."""

    tokens: list[int]
    seconds: float
    forwards: int
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def run_once(
    method: Method, model: Any, prompt: Sequence[int], seed: int, **generate_kwargs: Any
) -> Run:
    """One timed generation, seeded; what it runs of the target is counted from outside."""
    input_ids_1T = torch.tensor([list(prompt)], device=model.device)
    mask_1T = torch.ones_like(input_ids_1T)
    torch.manual_seed(seed)
    with _forwards(model) as forwards:
        _synchronize(model)
        started = time.perf_counter()
        output = method.generate(input_ids_1T, attention_mask=mask_1T, **generate_kwargs)
        _synchronize(model)
        seconds = time.perf_counter() - started
    phases = {}
    if method.stats is not None:
        stats = method.stats()
        phases = dict(stats.seconds) | {"other": seconds - sum(stats.seconds.values())}
    return Run(output[0, len(prompt) :].tolist(), seconds, forwards["count"], phases)


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
                method, model, prompt, 0, max_new_tokens=WARM_UP_TOKENS, do_sample=False
            )
            times.append(done.seconds / len(done.tokens))
    return min(seconds, key=lambda count: statistics.median(seconds[count][1:]))


@contextmanager
def _forwards(model: Any) -> Iterator[Counter[str]]:
    """Count the target's forwards within the block, whoever asks for them."""
    counts: Counter[str] = Counter(count=0)
    hook = model.register_forward_hook(lambda *_: counts.update(count=1))
    try:
        yield counts
    finally:
        hook.remove()


def _synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
