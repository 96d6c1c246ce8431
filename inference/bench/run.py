"""Every method on the same prompts, in one process, each output checked against plain decoding.

Timings on a shared machine drift, so the methods take turns on every batch of prompts, in an order
that rotates, and what is reported are medians: of each batch's tokens per second, and of each
batch's ratio to plain decoding moments before or after.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import groupby, product
from typing import Any

import torch

from medusa_heads.data.prompts import stop_ids
from medusa_heads.inference.bench.methods import (
    PLAIN,
    Models,
    check_methods,
    make_method,
    needs_heads,
)
from medusa_heads.inference.bench.prompts import Prompt, check_enough
from medusa_heads.inference.bench.setting import Plan, decoding_options, measure
from medusa_heads.inference.bench.source import find_source, load_models
from medusa_heads.inference.bench.timed_run import Method, fastest_threads, run_once
from medusa_heads.inference.models.drafted import check_once
from medusa_heads.machine.facts import as_used, describe_machine

_DEFAULT_PLAN = Plan()


def benchmark(
    checkpoint: str | os.PathLike[str],
    prompts: Sequence[Prompt | Sequence[int]],
    plan: Plan = _DEFAULT_PLAN,
    *,
    target: str | None = None,
    draft_model: str | Sequence[str] = (),
    corpus: str | os.PathLike[str] | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
    on_setting: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure ways to decode a target; returns the report, plain values for JSON. Raises
    ValueError: no prompts, a prompt beyond the target's context, an unknown method, one whose draft
    model, heads or corpus were not given or the other way round, or an unusable checkpoint.

    Args:
        checkpoint: heads, as a folder or a hub's repository; or the target itself.
        prompts: of which a question's further turns are made with plain decoding's greedy answers.
        target: hub id or path of the target; by default the one the heads name.
        draft_model: hub id or path; of several, this engine's methods choose while they decode.
        corpus: file or folder of text, for the methods that continue one.
        progress: show progress bars, in generated batches.
        on_setting: called after each setting with the report so far.
    """
    drafts = [draft_model] if isinstance(draft_model, str) else list(draft_model)
    check_once(drafts)
    source = find_source(checkpoint, target, heads=needs_heads(plan.methods))
    check_methods(
        [setting.methods for setting in plan.settings],
        heads=source.checkpoint is not None,
        draft=bool(drafts),
        corpus=corpus is not None,
    )
    asked_for = {
        "checkpoint": str(checkpoint),
        "draft_models": drafts,
        "corpus": None if corpus is None else str(corpus),
    }
    options = {"device": device, "trust_remote_code": trust_remote_code}
    return measure_models(
        lambda dtype: load_models(source, drafts, corpus, dtype=dtype, **options),
        prompts,
        plan,
        asked_for,
        progress=progress,
        on_setting=on_setting,
    )


def measure_models(
    load: Callable[[torch.dtype], Models],
    prompts: Sequence[Prompt | Sequence[int]],
    plan: Plan,
    asked_for: Mapping[str, Any] | None = None,
    *,
    progress: bool = True,
    on_setting: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """`benchmark` of models that come from anywhere: `load` is called for each dtype, and gives
    what the settings' methods need. The report holds what was asked for, too. Raises ValueError: no
    prompts, or a prompt beyond the target's context."""
    if not prompts:
        raise ValueError("a benchmark needs at least one prompt, got none")
    asked = [p if isinstance(p, Prompt) else Prompt(tuple(p)) for p in prompts]
    if not any(prompt.follow_up for prompt in asked):  # known before anything is loaded
        check_enough(asked, max(plan.batch_sizes))
    machine = describe_machine()  # before our own work adds to the load
    report: dict[str, Any] = {}
    with _undisturbed():
        for dtype, settings in groupby(plan.settings, key=lambda setting: setting.dtype):
            torch.set_num_threads(machine["threads"])
            models = load(getattr(torch, dtype))
            model: Any = models.target.model
            _check_length(models, asked, plan)
            # Before methods are made: some choose their trees by what steps take.
            torch.set_num_threads(
                plan.threads or fastest_threads(model, asked[0].tokens, plan.max_new_tokens)
            )
            if not report:
                asked, left_out = _with_further_turns(models, asked, plan)
                _check_length(models, asked, plan)
                check_enough(asked, max(plan.batch_sizes))
                report = _about(models, plan, machine, left_out) | dict(asked_for or {})
            longest = max(len(prompt.tokens) for prompt in asked) + plan.max_new_tokens
            compiled = False
            for setting, size in product(settings, plan.batch_sizes):
                names = dict.fromkeys((PLAIN, *setting.methods))
                # Anew for each: some remember what they have read, and the prompts are the same.
                methods = [make_method(name, models, most_tokens=longest) for name in names]
                measured = measure(
                    setting, methods, model, asked, plan, batch_size=size, progress=progress
                )
                report["settings"].append(measured | {"threads": torch.get_num_threads()})
                on_setting(report)
                compiled = compiled or any(method.compiled for method in methods)
                del methods
                gc.collect()  # what they learnt of the machine is kept when they go
            # One copy at a time, and the graphs that were compiled of it go with it.
            if compiled:
                torch.compiler.reset()
            del models, model
    return report


def _about(models: Models, plan: Plan, machine: dict[str, Any], left_out: int) -> dict[str, Any]:
    return {
        "target": models.target.name_or_path,
        "machine": as_used(machine, models.target.device),
        "settings": [],
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "target_fingerprint": models.target.fingerprint(),
        "parameters": models.target.model.num_parameters(),
        "temperature": plan.temperature,
        "seed": plan.seed,
        "prompts_left_out": left_out,
    }


def _with_further_turns(
    models: Models, prompts: Sequence[Prompt], plan: Plan
) -> tuple[list[Prompt], int]:
    """Each prompt and its question's next turns, asked behind plain decoding's answers; and how
    many of those were too long."""
    model: Any = models.target.model
    options = decoding_options("greedy", model, plan)
    longest = plan.max_prompt_length
    all_turns, left_out, ends = list(prompts), 0, stop_ids(model)
    turn = list(prompts)
    while turn := [prompt for prompt in turn if prompt.follow_up is not None]:
        _check_length(models, turn, plan)
        following = []
        for prompt in turn:
            assert prompt.follow_up is not None
            answered = run_once(Method(PLAIN, model.generate), model, [prompt.tokens], 0, **options)
            (answer,) = answered.rows
            ended = answer[-1] in ends  # by a token that is no part of an answer
            following.append(prompt.follow_up(answer[: len(answer) - ended]))
        turn = [p for p in following if longest is None or len(p.tokens) <= longest]
        left_out += len(following) - len(turn)
        all_turns += turn
    return all_turns, left_out


def _check_length(models: Models, prompts: Sequence[Prompt], plan: Plan) -> None:
    longest = max(len(prompt.tokens) for prompt in prompts) + plan.max_new_tokens
    models.target.check_length(longest, "prompt and continuation")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Within the block, transformers draws no bars of its own through ours, and says nothing of how
    its own methods call it; behind it torch works on as many threads as before it."""
    from transformers.utils import logging

    threads = torch.get_num_threads()
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
