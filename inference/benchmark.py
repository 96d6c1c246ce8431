"""Every method on the same prompts, in one process, each output checked against plain decoding.

Timings on a shared machine drift, so the methods take turns on every prompt, in an order that
rotates, and what is reported are medians: of each prompt's tokens per second, and of each prompt's
ratio to plain decoding moments before or after.

Shapes: T prompt tokens.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from medusa_heads.inference.machine import describe_machine
from medusa_heads.inference.model import MedusaModel
from medusa_heads.inference.timed_run import WARM_UP_TOKENS, Method, Run, fastest_threads, run_once
from medusa_heads.inference.tree_plan import TreeSpec

PLAIN = "transformers generate"
PROMPT_LOOKUP = "transformers prompt lookup"
MEDUSA = "medusa heads, tree"
# The draft length that transformers' documentation uses for prompt lookup.
PROMPT_LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Setting:
    """What is measured: `"greedy"` or `"sampled"`, a dtype, and the methods compared in it."""

    name: str
    dtype: str
    methods: tuple[str, ...] = (PLAIN, PROMPT_LOOKUP, MEDUSA)


# Speed is measured in bf16. In fp32, where rounding cannot tip a choice, the output of the heads
# must be plain decoding's: there the proof counts and prompt lookup need not be timed once more.
DEFAULT_SETTINGS = (
    Setting("greedy", "bfloat16"),
    Setting("sampled", "bfloat16"),
    Setting("greedy", "float32", (PLAIN, MEDUSA)),
    Setting("sampled", "float32", (PLAIN, MEDUSA)),
)


def benchmark(
    checkpoint: str | os.PathLike[str],
    prompts: Sequence[Sequence[int]],
    *,
    target: str | None = None,
    settings: Sequence[Setting] = DEFAULT_SETTINGS,
    max_new_tokens: int = 128,
    temperature: float = 0.7,
    seed: int = 0,
    tree: TreeSpec = "auto",
    device: str | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure a heads checkpoint against transformers' own decoding.

    Args:
        checkpoint: folder written by train-heads.
        prompts: token ids of each prompt.
        target: hub id or path of the target; by default the one the heads name.
        settings: what to measure; a copy of the target is loaded per dtype, one at a time.
        max_new_tokens: tokens after each prompt; fewer where the target ends its text.
        temperature: of the sampled settings.
        seed: sampling of prompt i starts from seed + i, for every method.
        tree: drafted nodes a step.
        device: where to run; by default where transformers loads the target.
        threads: CPU threads; by default as many as plain decoding is fastest with, tried for each
            dtype, so that all methods are compared at the best that plain decoding can do.
        trust_remote_code: run the Python code that the target's repository brings.
        progress: show a progress bar, in generated sequences.

    Returns:
        The report, plain values for JSON: target, machine, settings with their methods.

    Raises:
        ValueError: no prompts, a prompt beyond the target's context, or an unusable checkpoint.
    """
    if not prompts or not settings or max_new_tokens < 1:
        raise ValueError("a benchmark needs at least one prompt, setting and new token")
    if temperature <= 0.0:
        raise ValueError(f"expected a temperature above 0, got {temperature}")
    machine = describe_machine()  # before our own work adds to the load

    def load(dtype: str) -> MedusaModel:
        torch.set_num_threads(machine["threads"])
        loaded = MedusaModel.from_pretrained(
            checkpoint,
            target=target,
            tree="none",
            dtype=getattr(torch, dtype),
            device=device,
            trust_remote_code=trust_remote_code,
        )
        _check_length(loaded, prompts, max_new_tokens)
        torch.set_num_threads(threads or fastest_threads(loaded.target.model, prompts[0]))
        loaded.use_tree(tree)
        return loaded

    # Before the bar: what is wrong with a checkpoint is told on a line of its own.
    with _no_loading_bars():
        medusa = load(settings[0].dtype)
    results: list[dict[str, Any]] = []
    total = sum(len(setting.methods) for setting in settings) * len(prompts)
    with (
        _no_loading_bars(),
        tqdm(total=total, desc="benchmark", unit="run", disable=not progress) as bar,
    ):
        for setting in settings:
            if medusa.target.dtype != getattr(torch, setting.dtype):
                medusa = load(setting.dtype)
            bar.set_description(f"{setting.dtype} {setting.name}")
            methods = [m for m in available_methods(medusa) if m.name in setting.methods]
            measured = measure(
                setting,
                methods,
                medusa.target.model,
                prompts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                on_run=bar.update,
            )
            results.append(measured | {"tree": medusa.tree, "threads": torch.get_num_threads()})
    torch.set_num_threads(machine["threads"])
    return {
        "target": medusa.target.name_or_path,
        "machine": machine,
        "settings": results,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "checkpoint": str(checkpoint),
        "target_fingerprint": medusa.target.fingerprint(),
        "parameters": medusa.target.model.num_parameters(),
        "temperature": temperature,
        "seed": seed,
    }


def available_methods(medusa: MedusaModel) -> list[Method]:
    """Plain decoding first: it is what the others are compared with."""
    model: Any = medusa.target.model

    def prompt_lookup(input_ids: Tensor, **kwargs: Any) -> Any:
        return model.generate(input_ids, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS, **kwargs)

    return [
        Method(PLAIN, model.generate),
        Method(PROMPT_LOOKUP, prompt_lookup),
        Method(MEDUSA, medusa.generate, lambda: medusa.last_stats),
    ]


def measure(
    setting: Setting,
    methods: Sequence[Method],
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    on_run: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """One setting: every method on every prompt, in turns; the first method is the reference."""
    sampling = {"do_sample": True, "temperature": temperature}
    decoding = sampling if setting.name == "sampled" else {"do_sample": False}
    pad = model.generation_config.pad_token_id
    kwargs = {**decoding, "pad_token_id": pad if pad is not None else 0}
    for method in methods:
        warm_up = min(WARM_UP_TOKENS, max_new_tokens)
        run_once(method, model, prompts[0], seed, max_new_tokens=warm_up, **kwargs)
    runs: dict[str, list[Run]] = {method.name: [] for method in methods}
    for index, prompt in enumerate(prompts):
        turn = index % len(methods)
        for method in [*methods[turn:], *methods[:turn]]:
            done = run_once(
                method, model, prompt, seed + index, max_new_tokens=max_new_tokens, **kwargs
            )
            runs[method.name].append(done)
            on_run()
    reference = runs[methods[0].name]
    return {
        "name": setting.name,
        "dtype": setting.dtype,
        "prompts": len(prompts),
        "new_tokens": max_new_tokens,
        "methods": [{"name": name, **summarise(done, reference)} for name, done in runs.items()],
    }


def summarise(runs: Sequence[Run], reference: Sequence[Run]) -> dict[str, Any]:
    """Medians over the prompts, with the quartiles beside them.

    A text that ends sooner takes less time, so prompts are compared by their rates; where the
    outputs are equally long that is the ratio of their times.
    """
    rates = [run.tokens_per_second for run in runs]
    ratios = [rate / plain.tokens_per_second for rate, plain in zip(rates, reference, strict=True)]
    same = [run.tokens == plain.tokens for run, plain in zip(runs, reference, strict=True)]
    phases: Counter[str] = Counter()
    for run in runs:
        phases.update(run.phases)
    summary: dict[str, Any] = {
        "tokens_per_second": statistics.median(rates),
        "speedup": statistics.median(ratios),
        "tokens_per_step": sum(len(run.tokens) for run in runs) / sum(run.forwards for run in runs),
        "identical": sum(same) / len(same),
        "tokens_per_second_quartiles": _quartiles(rates),
        "speedup_quartiles": _quartiles(ratios),
        "tokens": sum(len(run.tokens) for run in runs),
        "target_forwards": sum(run.forwards for run in runs),
    }
    if phases:
        summary["seconds_by_phase"] = dict(phases)
    return summary


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


@contextmanager
def _no_loading_bars() -> Iterator[None]:
    """Loading a model draws a bar of its own through ours: not within the block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_length(
    medusa: MedusaModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    longest, limit = max(map(len, prompts)) + max_new_tokens, medusa.target.max_positions
    if limit is not None and longest > limit:
        raise ValueError(
            f"{longest} tokens (prompt and continuation) do not fit the target's context of "
            f"{limit}: ask for fewer new tokens or shorter prompts"
        )
