"""How large a tree pays on this machine: expected tokens a step over the measured time of a step.

A tree of n nodes commits E(n) tokens a step, known from the heads' statistics, and a step takes
t(n) seconds, measured here on the very target, dtype and device, once, and kept on disk. The tree
that maximises E(n) / t(n) decodes fastest; on a GPU that may be 64 nodes, on two CPU cores eight.

Shapes: B batch, N tree nodes.
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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import LogitsProcessorList, StoppingCriteriaList

from medusa_heads.compiled import CompiledTarget
from medusa_heads.files import replace_file
from medusa_heads.heads import DraftHeads
from medusa_heads.inference.acceptance import SampleThenMatch
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.row import Row, StopCheck
from medusa_heads.inference.state import DecodingState
from medusa_heads.inference.tree_plan import make_drafter
from medusa_heads.statistics import HeadStatistics
from medusa_heads.target import TargetModel

CACHE_VARIABLE = "MEDUSA_HEADS_CACHE"
# With the root a multiple of what matrix units take at a time: a 17th row costs as much as a 32nd.
SIZES = (1, 3, 7, 11, 15, 23, 31, 47, 63)
DEFAULT_CONTEXT = 256
_REPEATS = 7
_SECONDS = 5.0  # where seven rounds take longer, fewer are measured, but at least two
_MOST_NODES = 1024
_AS_FAST = 0.98  # closer than this, measured times do not tell two trees apart


@dataclass(frozen=True)
class TreeSize:
    """One size of tree on this machine.

    Attributes:
        tree: in the words of tree_plan.py.
        step_seconds: measured time of a step.
        tokens_per_step: expected at a random position.
    """

    tree: str
    step_seconds: float
    tokens_per_step: float

    @property
    def tokens_per_second(self) -> float:
        """What the size is chosen by."""
        return self.tokens_per_step / self.step_seconds


def best_tree(
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics,
    *,
    context: int = DEFAULT_CONTEXT,
    batch_size: int = 1,
) -> str:
    """The tree that this machine decodes fastest with, in the words of tree_plan.py."""
    sizes = tune(target, heads, statistics, context=context, batch_size=batch_size)
    return fastest(sizes, batch_size).tree


def fastest(sizes: Sequence[TreeSize], batch_size: int = 1) -> TreeSize:
    """Of measured trees the one to draft: the smallest among the fastest.

    Rows without drafts keep step. With drafts a batch waits for its last row, which took 1.07 times
    the mean row's steps in batches of 2, 1.2 times in 4, 1.4 times in 8 and 1.5 times in 16 (the
    demo's heads, greedy and sampled text): a tree must gain more than that.
    """
    last_row = 1 + math.log2(batch_size) / 8

    def speed(size: TreeSize) -> float:
        return size.tokens_per_second / (1.0 if size.tree == "none" else last_row)

    best = max(map(speed, sizes))
    return min((s for s in sizes if speed(s) >= _AS_FAST * best), key=lambda s: _nodes(s.tree))


def tune(
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics,
    *,
    context: int = DEFAULT_CONTEXT,
    batch_size: int = 1,
    refresh: bool = False,
) -> list[TreeSize]:
    """Every tree worth considering, with its measured step time.

    Args:
        target: the target.
        heads: attached to it.
        statistics: measured ranks of the heads.
        context: tokens in the cache while measuring.
        batch_size: sequences decoded together.
        refresh: measure even if an earlier measurement is on disk.

    Raises:
        ValueError: the context does not fit the target.
    """
    if target.max_positions is not None and context + max(SIZES) > target.max_positions:
        context = target.max_positions - max(SIZES)
    if context < 1:
        raise ValueError(
            f"the target's context of {target.max_positions} leaves no room to measure"
        )
    expected = expected_tokens(statistics)
    # More nodes than this in all rows together pay on no machine, and take long to measure.
    most = max(_MOST_NODES // batch_size, 1)
    expected = {tree: tokens for tree, tokens in expected.items() if _nodes(tree) <= most}
    path = measurement_folder() / f"{_key(target, heads, context, batch_size)}.json"
    costs = None if refresh else _read(path)
    if costs is None or not set(expected) <= set(costs):
        # Uncompiled where the target would compile: every size would be a graph of its own.
        with target.uncompiled() if isinstance(target, CompiledTarget) else nullcontext():
            costs = measure_step_seconds(
                target, heads, statistics, list(expected), context, batch_size
            )
        _write(path, costs)
    return [TreeSize(tree, costs[tree], tokens) for tree, tokens in expected.items()]


def expected_tokens(statistics: HeadStatistics) -> dict[str, float]:
    """Expected tokens a step of each tree considered."""
    largest = len(statistics.paths)
    static = {f"static:{n}": statistics.expected_tokens_per_step(n) for n in SIZES if n <= largest}
    dynamic = {f"dynamic:{n}": e for n, e in statistics.dynamic_tokens_per_step.items()}
    # Drafting nothing is a choice too: on some machines every tree costs more than it brings.
    return {"none": 1.0} | static | dynamic


def _nodes(tree: str) -> int:
    return int(tree.partition(":")[2] or 0) + 1


@torch.inference_mode()
def measure_step_seconds(
    target: TargetModel,
    heads: DraftHeads,
    statistics: HeadStatistics,
    trees: Sequence[str],
    context: int,
    batch_size: int,
) -> dict[str, float]:
    """Median seconds of a decoding step (draft, verification, walk) for each tree, interleaved."""
    random = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(target.vocab_size, (batch_size, context), generator=random)
    ids_BT = ids_BT.to(target.device)
    cache = target.new_cache(batch_size, context + max(SIZES) + 1)
    stop = StopCheck(StoppingCriteriaList())
    rows = [Row(i, batch_size, ids_T, stop) for i, ids_T in enumerate(ids_BT)]
    state = DecodingState(rows, cache, [0] * batch_size)
    with target.capture_prompt() as prompt_hidden:
        target.model(ids_BT, past_key_values=cache, use_cache=True)
    state.hidden_BD = prompt_hidden[0][:, -1].clone()
    state.take_prompt(prompt_hidden[0][:, -2:])  # as if the last step had committed two tokens
    state.roots_B = ids_BT[:, -1]
    rule = SampleThenMatch(LogitsProcessorList(), do_sample=False)
    drafters = {tree: make_drafter(tree, heads, statistics) for tree in trees}
    seconds: dict[str, list[float]] = {tree: [] for tree in trees}
    started = time.perf_counter()
    for repeat in range(_REPEATS + 1):
        if repeat > 2 and time.perf_counter() - started > _SECONDS:
            break
        for tree, drafter in drafters.items():
            elapsed = _time_step(target, drafter, rule, state)
            if repeat:  # the first round warms up
                seconds[tree].append(elapsed)
    return {tree: median(times) for tree, times in seconds.items()}


def _time_step(
    target: TargetModel,
    drafter: Drafter,
    rule: SampleThenMatch,
    state: DecodingState,
) -> float:
    _wait(target.device)
    started = time.perf_counter()
    tree = drafter.propose(state)
    logits_BNV = target.verify(tree, state.cache, state.tree_mask(tree))
    rule(tree, logits_BNV, state.rows)  # waits for the device; the state itself does not advance
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _key(target: TargetModel, heads: DraftHeads, context: int, batch_size: int) -> str:
    """What a step's time depends on."""
    device: Any = target.device
    facts = {
        "target": target.config.to_dict() | {"_name_or_path": None},
        "heads": heads.config.to_dict(),
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
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def measurement_folder() -> Path:
    """Where measured step times are kept."""
    base = os.environ.get(CACHE_VARIABLE)
    if base:
        return Path(base) / "step_seconds"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "medusa_heads" / "step_seconds"


def _read(path: Path) -> dict[str, float] | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {str(tree): float(seconds) for tree, seconds in stored.items()}
    except (OSError, ValueError, AttributeError):
        return None  # nothing there, or damaged: measured anew


def _write(path: Path, costs: Mapping[str, float]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(dict(costs), indent=2) + "\n")
    except OSError:
        return  # a read-only home: measured again next time
