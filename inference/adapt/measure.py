"""What decoding steps take on this machine: measured once, and kept on disk. What was measured
beside other programs serves this process alone: they may be gone later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.step_bench import SIZES, RandomChain, StepBench, StepSeconds
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.machine.measurements import (
    Contention,
    Measurements,
    as_seconds,
    measurement_folder,
)
from medusa_heads.target.graphs.captured import as_it_is
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.packed.matrices import PackedMatrices
from medusa_heads.target.target import TargetModel

DEFAULT_CONTEXT = 256
_FEW_SIZES, _SHORT_CONTEXT = (3, 15, 63), 32  # of a large target, whose every forward counts
_SECONDS = 0.5  # of measuring a small one
_SLOW = 0.1  # seconds of a step that is not worth repeating
_Of = TypeVar("_Of")

_unkept: dict[str, Mapping[str, Any]] = {}  # what was measured beside other programs


def target_clock(
    target: TargetModel, drafters: Mapping[str, tuple[Drafter, Mapping[str, Any]]] | None = None
) -> Clock:
    """A clock for this target on this machine.

    A target whose forward takes long is measured in at most six of them; decoding corrects the
    rest. What is kept of its steps serves all sources, each of which adds its own drafting.

    Args:
        drafters: sources whose drafting is timed too: a drafter for each, and what it depends on.
    """
    target = as_it_is(target)  # whose cache a text may be using
    clock, _ = _once(target, "clock", {}, _clock, lambda: {"step": _measure_steps(target)})
    for name, (drafter, of) in (drafters or {}).items():
        own, measure = {"source": [name, dict(of)]}, partial(_measure_drafting, target, drafter)
        drafting, _ = _once(target, "drafting", own, _drafting, measure)
        clock.learn_drafting(name, drafting)
    return clock


def step_seconds(
    target: TargetModel,
    drafters: Mapping[str, Drafter],
    kind: Mapping[str, Any],
    context: int,
    batch_size: int,
    *,
    refresh: bool = False,
) -> tuple[dict[str, StepSeconds], bool]:
    """Seconds of a step with each drafter, from disk where they were measured before; and whether
    other programs had the processors while they were, in which case they are not on disk. Raises
    ValueError: the context does not fit the target.

    Args:
        drafters: by names that say what they are.
        kind: whatever else of the drafters a step's time depends on, as plain values.
        context: tokens in the cache while measuring.
        refresh: measure even if there is an earlier measurement, on disk or of this process.
    """
    target = as_it_is(target)
    context = _fitting(target, context, max(each.num_nodes for each in drafters.values()))
    facts = {"kind": dict(kind), "context": context, "batch_size": batch_size}

    def read(kept: Mapping[str, Any]) -> dict[str, StepSeconds]:
        return {
            name: StepSeconds(as_seconds(step), as_seconds(drafting, least=0))
            for name, (step, drafting) in ((name, kept[name]) for name in drafters)
        }

    def measure() -> dict[str, StepSeconds]:
        return StepBench(target, context, batch_size).rounds(drafters, 10 * _SECONDS)

    return _once(target, "steps", facts, read, measure, refresh=refresh)


def _once(
    target: TargetModel,
    kind: str,
    facts: Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], _Of],
    measure: Callable[[], Mapping[str, Any]],
    *,
    refresh: bool = False,
) -> tuple[_Of, bool]:
    """What was measured under these facts and the target's, as `read` makes it of what is kept; and
    whether it was beside other programs. Where nothing is kept, or not all that is asked for, or it
    is damaged, or it shall be refreshed, it is measured and kept."""
    facts = {**target_facts(target), **facts}
    store, key = Measurements(), f"{measurement_folder()} {kind} {facts}"
    try:
        if key in _unkept and not refresh:
            return read(_unkept[key]), True
        return read({} if refresh else store.read(kind, facts) or {}), False
    except (AttributeError, KeyError, TypeError, ValueError):
        contention = Contention()
        # Uncompiled where the target would compile: every size would be a graph of its own.
        with target.uncompiled() if isinstance(target, CompiledTarget) else nullcontext():
            measured = measure()
    if beside_others := contention.seen():
        _unkept[key] = measured
    else:
        _unkept.pop(key, None)
        store.write(kind, facts, measured)
    return read(measured), beside_others


def _clock(kept: Mapping[str, Any]) -> Clock:
    return Clock({int(size): as_seconds(seconds) for size, seconds in kept["step"].items()})


def _measure_steps(target: TargetModel) -> dict[int, float]:
    sizes = sizes_for(target)
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


def _drafting(kept: Mapping[str, Any]) -> float:
    return as_seconds(kept["seconds"], least=0)


def _measure_drafting(target: TargetModel, drafter: Drafter) -> dict[str, float]:
    """Seconds of a draft; no step is made."""
    bench = StepBench(target, _fitting(target, _SHORT_CONTEXT, 1), 1)
    bench.draft(drafter)
    return {"seconds": sorted(bench.draft(drafter) for _ in range(5))[1]}


def target_facts(target: TargetModel) -> dict[str, Any]:
    """What the time of a target's step depends on, besides the machine."""
    where = target.device.type
    if where == "cuda":  # of several the machine's facts tell one, and they may differ
        where = torch.cuda.get_device_name(target.device)
    return {
        "target": target.config.to_dict() | {"_name_or_path": None},
        "dtype": str(target.dtype),
        "attention": target.config._attn_implementation,
        "device": where,
        "threads": torch.get_num_threads(),
        # Whichever view of the model this is.
        "packed": sorted(PackedMatrices.of(target.model).rows),
    }


def _fitting(target: TargetModel, context: int, nodes: int) -> int:
    """The context, or as much of it as the target has room for beside so many nodes. Raises
    ValueError: there is none."""
    limit = target.max_positions
    if limit is not None:
        context = min(context, limit - nodes - 1)
    if context < 1:
        raise ValueError(f"the target's context of {limit} leaves no room to measure")
    return context


def room(target: TargetModel) -> int:
    """The most nodes, root included, that trees for this target have: half its context."""
    return 1 << 30 if target.max_positions is None else max(target.max_positions // 2, 2)


def sizes_for(target: TargetModel) -> list[int]:
    """Numbers of drafted nodes that this target can verify; 0 is plain decoding."""
    return [size for size in (0, *SIZES) if size < room(target)]
