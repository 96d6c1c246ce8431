"""What a decoding step takes on this machine, measured and kept on disk.

Where the rounds of a measurement disagree, something else ran meanwhile. What was measured is then
used, but later processes measure again, a few times at most; of each step the lowest time stays.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import LogitsProcessorList, StoppingCriteriaList

from medusa_heads.compiled import CompiledTarget
from medusa_heads.files import replace_file
from medusa_heads.inference.acceptance import SampleThenMatch
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.row import Row, StopCheck
from medusa_heads.inference.state import DecodingState
from medusa_heads.target import TargetModel

CACHE_VARIABLE = "MEDUSA_HEADS_CACHE"
# With the root a multiple of what matrix units take at a time: a 17th row costs as much as a 32nd.
SIZES = (1, 3, 7, 11, 15, 23, 31, 47, 63)
DEFAULT_CONTEXT = 256
_REPEATS = 7
_SECONDS = 5.0  # where seven rounds take longer, fewer are measured, but at least two
# Rounds disagreed by 0.1 to 0.25 where nothing else ran, with as many busy processes as cores or
# more by 0.6 to 1.5.
_AGREEING = 0.35
_ATTEMPTS = 3
_measured_here: set[Path] = set()  # what keeps the machine busy may take as long as this process


class StepSeconds(NamedTuple):
    """Usual seconds of a step: draft, verification, walk.

    Attributes:
        step: of all of it.
        drafting: of the draft in it.
        spread: how much longer the upper quartile of the rounds' steps is, over `step`.
    """

    step: float
    drafting: float
    spread: float = 0.0


class Measurement(NamedTuple):
    """Steps with several drafters.

    Attributes:
        steps: by the drafters' names.
        attempts: how often all of them were measured.
    """

    steps: dict[str, StepSeconds]
    attempts: int = 1

    @property
    def noise(self) -> float:
        """By how much rounds disagree, over what a step takes."""
        return max(seconds.spread for seconds in self.steps.values())

    def lowest(self, other: Measurement) -> Measurement:
        """Of each step the lower time: whatever else runs on a machine only ever adds to it."""
        steps = dict(self.steps)
        for name, seconds in other.steps.items():
            steps[name] = min(seconds, steps.get(name, seconds), key=lambda each: each.step)
        return Measurement(steps, self.attempts + other.attempts)


def step_seconds(
    target: TargetModel,
    drafters: Mapping[str, Drafter],
    kind: Mapping[str, Any],
    context: int,
    batch_size: int,
    *,
    refresh: bool = False,
) -> dict[str, StepSeconds]:
    """Seconds of a step with each drafter, from disk where they were measured well before.

    Args:
        target: the target.
        drafters: by names that say what they are.
        kind: whatever else of the drafters a step's time depends on, as plain values.
        context: tokens in the cache while measuring.
        batch_size: sequences decoded together.
        refresh: measure even if an earlier measurement is on disk.

    Raises:
        ValueError: the context does not fit the target.
    """
    if target.max_positions is not None:
        most = max(drafter.num_nodes for drafter in drafters.values())
        context = min(context, target.max_positions - most)
    if context < 1:
        raise ValueError(
            f"the target's context of {target.max_positions} leaves no room to measure"
        )
    path = measurement_folder() / f"{_key(target, kind, context, batch_size)}.json"
    known = None if refresh else _read(path)
    if known is not None and not set(drafters) <= set(known.steps):
        known = None
    if known is None or (
        known.noise > _AGREEING and known.attempts < _ATTEMPTS and path not in _measured_here
    ):
        # Uncompiled where the target would compile: every size would be a graph of its own.
        with target.uncompiled() if isinstance(target, CompiledTarget) else nullcontext():
            measured = Measurement(measure_step_seconds(target, drafters, context, batch_size))
        known = measured if known is None else known.lowest(measured)
        _write(path, known)
        _measured_here.add(path)
    return {name: known.steps[name] for name in drafters}


@torch.inference_mode()
def measure_step_seconds(
    target: TargetModel, drafters: Mapping[str, Drafter], context: int, batch_size: int
) -> dict[str, StepSeconds]:
    """Measure steps with each drafter, interleaved."""
    random = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(target.vocab_size, (batch_size, context), generator=random)
    ids_BT = ids_BT.to(target.device)
    most = max(drafter.num_nodes for drafter in drafters.values())
    cache = target.new_cache(batch_size, context + most)
    stop = StopCheck(StoppingCriteriaList())
    rows = [Row(i, batch_size, ids_T, stop) for i, ids_T in enumerate(ids_BT)]
    state = DecodingState(rows, cache, [0] * batch_size)
    with target.capture_prompt() as prompt_hidden:
        target.model(ids_BT, past_key_values=cache, use_cache=True)
    state.hidden_BD = prompt_hidden[0][:, -1].clone()
    state.take_prompt(prompt_hidden[0][:, -2:])  # as if the last step had committed two tokens
    state.roots_B = ids_BT[:, -1]
    rule = SampleThenMatch(LogitsProcessorList(), do_sample=False)
    seconds: dict[str, list[StepSeconds]] = {name: [] for name in drafters}
    started = time.perf_counter()
    for repeat in range(_REPEATS + 1):
        if repeat > 2 and time.perf_counter() - started > _SECONDS:
            break
        for name, drafter in drafters.items():
            _time_step(target, drafter, rule, state)  # memory holds what the last one needed
            elapsed = _time_step(target, drafter, rule, state)
            if repeat:  # the first round warms up
                seconds[name].append(elapsed)
    return {name: _usual(times) for name, times in seconds.items()}


def _usual(times: Sequence[StepSeconds]) -> StepSeconds:
    """The lower quartiles: whatever else runs on a machine only ever adds to a time."""
    quarter = (len(times) - 1) // 4
    steps = sorted(each.step for each in times)
    drafting = sorted(each.drafting for each in times)[quarter]
    return StepSeconds(steps[quarter], drafting, steps[-1 - quarter] / steps[quarter] - 1)


def _time_step(
    target: TargetModel,
    drafter: Drafter,
    rule: SampleThenMatch,
    state: DecodingState,
) -> StepSeconds:
    _wait(target.device)
    started = time.perf_counter()
    tree = drafter.propose(state)
    _wait(target.device)
    drafted = time.perf_counter()
    logits_BNV = target.verify(tree, state.cache, state.tree_mask(tree))
    rule(tree, logits_BNV, state.rows)  # waits for the device; the state itself does not advance
    return StepSeconds(time.perf_counter() - started, drafted - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _key(target: TargetModel, kind: Mapping[str, Any], context: int, batch_size: int) -> str:
    """What a step's time depends on."""
    device: Any = target.device
    facts = {
        "target": target.config.to_dict() | {"_name_or_path": None},
        "drafters": dict(kind),
        "dtype": str(target.dtype),
        "attention": target.config._attn_implementation,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} {platform.processor()} {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "context": context,
        "batch_size": batch_size,
        "of_all_times": "lower quartile",
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def room(target: TargetModel) -> int:
    """The most nodes, root included, that trees for this target have: half its context."""
    return 1 << 30 if target.max_positions is None else max(target.max_positions // 2, 2)


def last_row(batch_size: int) -> float:
    """How many steps a batch's last row takes, over the mean row's. With the demo's heads, greedy
    and sampled text: 1.07 in batches of 2, 1.2 of 4, 1.4 of 8, 1.5 of 16."""
    return 1 + math.log2(batch_size) / 8


def measurement_folder() -> Path:
    """Where measured step times are kept."""
    base = os.environ.get(CACHE_VARIABLE)
    if base:
        return Path(base) / "step_seconds"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "medusa_heads" / "step_seconds"


def _read(path: Path) -> Measurement | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        steps = {name: StepSeconds(*map(float, times)) for name, times in stored["steps"].items()}
        if steps and all(0 < each.step < math.inf for each in steps.values()):
            return Measurement(steps, int(stored["attempts"]))
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        pass  # nothing there, damaged or of an earlier version: measured anew
    return None


def _write(path: Path, measurement: Measurement) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(measurement._asdict(), indent=2) + "\n")
    except OSError:
        return  # a read-only home: measured again next time
