"""What a benchmark measures, and one setting of it: its methods in turns, batch after batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from medusa_heads.inference.bench.methods import HEADS, PLAIN, PLAIN_METHODS, PROMPT_LOOKUP, STREAM
from medusa_heads.inference.bench.prompts import Prompt, batches_of
from medusa_heads.inference.bench.timed_run import (
    WARM_UP_TOKENS,
    Method,
    TimedRun,
    run_once,
    summarise,
    take_turns,
)
from medusa_heads.settings import above_zero, at_least


@dataclass(frozen=True)
class Setting:
    """What is measured: `"greedy"` or `"sampled"`, a dtype, and the methods compared in it. Plain
    decoding, which all output is compared with, is measured whether it is named or not."""

    name: str
    dtype: str
    methods: tuple[str, ...] = (PLAIN, PROMPT_LOOKUP, HEADS)


def default_settings(dtypes: Sequence[str] = ("float32",)) -> list[Setting]:
    """Greedy and sampled in each dtype. In fp32, where rounding cannot tip a choice, the output of
    the heads must be plain decoding's (sampled, by its random stream): behind another dtype there
    the proof counts, and prompt lookup is not timed once more."""
    found, dtypes = [], list(dict.fromkeys(dtypes))
    for dtype in dtypes:
        for name, same in (("greedy", HEADS), ("sampled", HEADS + STREAM)):
            proves = dtype == "float32" and len(dtypes) > 1
            found.append(Setting(name, dtype, (PLAIN, same) if proves else Setting.methods))
    return found


@dataclass(frozen=True)
class Plan:
    """What a benchmark measures, whichever models it is given. Raises ValueError: nothing is to be
    measured, or a number is out of its range."""

    # One after the other; a copy of the target is loaded per dtype, one at a time.
    settings: Sequence[Setting] = field(default_factory=default_settings)
    batch_sizes: Sequence[int] = (1,)  # prompts decoded together; all is measured with each
    max_new_tokens: int = 128  # after each prompt; fewer where the target ends its text
    max_prompt_length: int | None = None  # longer further turns are left out, and counted
    temperature: float = 0.7  # of the sampled settings
    seed: int = 0  # sampling of batch i starts from seed + i, for every method
    # Of the CPU; by default as many as plain decoding is fastest with, tried for each dtype, so
    # that all methods are compared at the best that plain decoding can do.
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.settings:
            raise ValueError("a benchmark needs at least one setting, got none")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be at least 1, got {list(self.batch_sizes)}")
        at_least(self, 1, "max_new_tokens", "max_prompt_length", "threads")
        above_zero(self, "temperature")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be a number of 64 bits, got {self.seed}")

    @property
    def methods(self) -> list[str]:
        """The names of all that is measured in any setting."""
        return list(dict.fromkeys(name for each in self.settings for name in each.methods))


def measure(
    setting: Setting,
    methods: Sequence[Method],
    model: Any,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    batch_size: int = 1,
    progress: bool = False,
) -> dict[str, Any]:
    """One setting: every method on every batch, in turns; the first method is plain decoding, and
    the fastest plain one the reference of the speed-ups."""
    options = decoding_options(setting.name, model, plan)
    batches = batches_of(prompts, batch_size)
    title = f"{setting.dtype} {setting.name}" + f", {batch_size} rows" * (batch_size > 1)
    total = len(batches) * len(methods)
    with tqdm(total=total, desc=title, unit="run", disable=not progress) as bar:
        running, left_out = _warm_up(methods, model, batches[0], options)
        bar.update(len(left_out) * len(batches))
        asked = [[prompt.tokens for prompt in batch] for batch in batches]
        runs = take_turns(running, model, asked, plan.seed, bar.update, **options)
    plain = next(iter(runs))
    candidates = [name for name in runs if name in PLAIN_METHODS] or [plain]
    reference = max(
        candidates, key=lambda name: statistics.median(r.tokens_per_second for r in runs[name])
    )
    kinds = [_category(batch) for batch in batches]
    entries = []
    for method in running:
        compared = (runs[method.name], runs[reference], runs[plain])
        entry = {"name": method.name, **summarise(*compared)}
        if method.nodes is not None:
            entry["nodes"] = method.nodes()
        if len(set(kinds)) > 1:
            entry["by_category"] = _by_category(kinds, compared)
        entries.append(entry)
    return {
        "name": setting.name,
        "dtype": setting.dtype,
        "batch_size": batch_size,
        "prompts": len(batches) * batch_size,
        "new_tokens": plan.max_new_tokens,
        "reference": reference,
        "methods": entries,
        "left_out": left_out,
    }


def decoding_options(name: str, model: Any, plan: Plan) -> dict[str, Any]:
    """What generate() is called with in a setting of this name."""
    sampling = {"do_sample": True, "temperature": plan.temperature}
    return {
        **(sampling if name == "sampled" else {"do_sample": False}),
        "pad_token_id": model.generation_config.pad_token_id or 0,
        "max_new_tokens": plan.max_new_tokens,
        "use_cache": True,  # which training may have turned off
    }


def _warm_up(
    methods: Sequence[Method], model: Any, batch: Sequence[Prompt], options: dict[str, Any]
) -> tuple[list[Method], dict[str, str]]:
    """The methods that run here, each warm, and why the others do not."""
    running, left_out = [], {}
    short = options | {"max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"])}
    for method in methods:
        if method.one_row and len(batch) > 1:
            left_out[method.name] = "transformers assists one sequence at a time"
            continue
        started = time.perf_counter()
        try:
            run_once(method, model, [prompt.tokens for prompt in batch], 0, **short)
        # There may be no compiler here, or one that gives up. Other mistakes are ours.
        except RuntimeError as error:
            from torch._dynamo.exc import TorchDynamoException

            if not method.compiled or not isinstance(error, TorchDynamoException):
                raise
            # The first line names the compiler, the second what befell it.
            reason = " ".join(str(error).split("\n", maxsplit=2)[:2]).strip()
            seconds = time.perf_counter() - started
            left_out[method.name] = f"torch.compile failed after {seconds:.0f} seconds: {reason}"
        else:
            running.append(method)
    return running, left_out


def _category(batch: Sequence[Prompt]) -> str:
    """What a batch's prompts are, in a table of categories."""
    kinds = {prompt.category or "other" for prompt in batch}
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _by_category(
    kinds: Sequence[str], compared: Sequence[Sequence[TimedRun]]
) -> dict[str, dict[str, Any]]:
    shown = ("tokens_per_second", "speedup", "speedup_quartiles", "tokens_per_step", "identical")
    found = {}
    for kind in dict.fromkeys(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        whole = summarise(*([runs[place] for place in places] for runs in compared))
        found[kind] = {name: whole[name] for name in shown}
    return found
