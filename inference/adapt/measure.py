"""What decoding steps take on this machine: measured once, and kept on disk."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.step_bench import SIZES, RandomChain, StepBench, StepSeconds
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.machine import Measurements, as_seconds
from medusa_heads.target.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel

DEFAULT_CONTEXT = 256
_FEW_SIZES, _SHORT_CONTEXT = (3, 15, 63), 32  # of a large target, whose every forward counts
_SECONDS = 0.5  # of measuring a small one
_SLOW = 0.1  # seconds of a step that is not worth repeating


def target_clock(
    target: TargetModel, drafters: Mapping[str, tuple[Drafter, Mapping[str, Any]]] | None = None
) -> Clock:
    """A clock for this target on this machine.

    A target whose forward takes long is measured in at most six of them; decoding corrects the
    rest. What is kept of its steps serves all sources, each of which adds its own drafting.

    Args:
        target: the target.
        drafters: sources whose drafting is timed too: a drafter for each, and what it depends on.
    """
    store, facts = Measurements(), target_facts(target)
    steps = _kept_steps(store.read("clock", facts))
    if steps is None:
        with _eager(target):
            steps = _measure_steps(target)
        store.write("clock", facts, {"step": steps})
    drafting = {
        name: _drafting_seconds(target, drafter, facts | {"source": [name, dict(of)]}, store)
        for name, (drafter, of) in (drafters or {}).items()
    }
    return Clock(steps, drafting)


def _kept_steps(kept: Mapping[str, Any] | None) -> dict[int, float] | None:
    """Seconds by tokens; None where nothing was kept, or it was damaged."""
    try:
        steps = {int(size): as_seconds(seconds) for size, seconds in (kept or {})["step"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return steps if steps and min(steps) > 0 else None


def _measure_steps(target: TargetModel) -> dict[int, float]:
    sizes = [size for size in (0, *SIZES) if size < room(target)]
    few = [size for size in _FEW_SIZES if size in sizes]
    chains = {size: RandomChain(size, target.vocab_size) for size in sizes}
    bench = StepBench(target, _fitting(target, _SHORT_CONTEXT, max(sizes)), 1)
    plain = min(bench.time(chains[0]) for _ in range(2))  # the first one finds nothing prepared
    if plain.step >= _SLOW:
        steps = {size: bench.time(chains[size]) for size in few}
    elif plain.step * 2 * len(sizes) * 3 > _SECONDS:
        # So short a step still shows what the first one of its size prepares.
        steps = {size: [bench.time(chains[size]) for _ in range(2)][-1] for size in few[-2:]}
    else:
        bench = StepBench(target, _fitting(target, DEFAULT_CONTEXT, max(sizes)), 1)
        steps = bench.rounds(chains, _SECONDS)
    return {1: plain.step} | {size + 1: each.step for size, each in steps.items()}


def _drafting_seconds(
    target: TargetModel, drafter: Drafter, facts: Mapping[str, Any], store: Measurements
) -> float:
    """Seconds of a draft, from the store where they were measured before; no step is made."""
    try:
        return as_seconds((store.read("drafting", facts) or {})["seconds"])
    except (KeyError, ValueError):
        pass  # nothing there, or damaged: measured anew
    with _eager(target):
        bench = StepBench(target, _fitting(target, _SHORT_CONTEXT, 1), 1)
        bench.draft(drafter)
        seconds = sorted(bench.draft(drafter) for _ in range(5))[1]
    store.write("drafting", facts, {"seconds": seconds})
    return seconds


def step_seconds(
    target: TargetModel,
    drafters: Mapping[str, Drafter],
    kind: Mapping[str, Any],
    context: int,
    batch_size: int,
    *,
    refresh: bool = False,
) -> dict[str, StepSeconds]:
    """Seconds of a step with each drafter, from disk where they were measured before.

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
    most = max(drafter.num_nodes for drafter in drafters.values())
    context = _fitting(target, context, most)
    facts = target_facts(target) | {
        "kind": dict(kind),
        "context": context,
        "batch_size": batch_size,
    }
    store = Measurements()
    known = None if refresh else _known(store.read("steps", facts))
    if known is None or not set(drafters) <= set(known):
        # Uncompiled where the target would compile: every size would be a graph of its own.
        with _eager(target):
            known = measure_step_seconds(target, drafters, context, batch_size)
        store.write("steps", facts, known)
    return {name: known[name] for name in drafters}


def measure_step_seconds(
    target: TargetModel, drafters: Mapping[str, Drafter], context: int, batch_size: int
) -> dict[str, StepSeconds]:
    """Steps with each drafter, interleaved."""
    return StepBench(target, context, batch_size).rounds(drafters, 10 * _SECONDS)


def _known(stored: Mapping[str, Any] | None) -> dict[str, StepSeconds] | None:
    try:
        known = {
            name: StepSeconds(as_seconds(step), as_seconds(drafting, least=0))
            for name, (step, drafting) in (stored or {}).items()
        }
    except (TypeError, ValueError):
        return None
    return known or None


def _eager(target: TargetModel) -> Any:
    return target.uncompiled() if isinstance(target, CompiledTarget) else nullcontext()


def target_facts(target: TargetModel) -> dict[str, Any]:
    """What the time of a target's step depends on, besides the machine."""
    return {
        "target": target.config.to_dict() | {"_name_or_path": None},
        "dtype": str(target.dtype),
        "attention": target.config._attn_implementation,
        "device": str(target.device.type),
        "threads": torch.get_num_threads(),
    }


def _fitting(target: TargetModel, context: int, nodes: int) -> int:
    """The context, or as much of it as the target has room for beside so many nodes.

    Raises:
        ValueError: there is none.
    """
    limit = target.max_positions
    if limit is not None:
        context = min(context, limit - nodes - 1)
    if context < 1:
        raise ValueError(f"the target's context of {limit} leaves no room to measure")
    return context


def room(target: TargetModel) -> int:
    """The most nodes, root included, that trees for this target have: half its context."""
    return 1 << 30 if target.max_positions is None else max(target.max_positions // 2, 2)
