"""What decoding steps take on this machine: measured once, and kept on disk.

Shapes: B batch, T tokens, N nodes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from medusa_heads.inference.acceptance import SampleThenMatch
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.recurrent import decoding_state
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.machine import Measurements, as_seconds
from medusa_heads.target.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree, TreeShape, cartesian_choices

# With the root a multiple of what matrix units take at a time: a 17th row costs as much as a 32nd.
SIZES = (1, 3, 7, 11, 15, 23, 31, 47, 63)
DEFAULT_CONTEXT = 256
_FEW_SIZES, _SHORT_CONTEXT = (3, 15, 63), 32  # of a large target, whose every forward counts
_SECONDS = 0.5  # of measuring a small one
_SLOW = 0.1  # seconds of a step that is not worth repeating
_ROUNDS = 7


class StepSeconds(NamedTuple):
    """Usual seconds of a step: draft, verification, walk.

    Attributes:
        step: of all of it.
        drafting: of the draft in it.
    """

    step: float
    drafting: float


class RandomChain(Drafter):
    """A chain of tokens drawn once: costs what any chain costs, of a mixture of experts too."""

    def __init__(self, num_drafted: int, vocab_size: int) -> None:
        self._shape = TreeShape.from_choices(cartesian_choices([1] * num_drafted))
        self.num_nodes = self._shape.num_nodes
        random = torch.Generator().manual_seed(num_drafted)
        self._tokens_N = torch.randint(vocab_size, (num_drafted,), generator=random)

    def propose(self, state: DecodingState) -> TokenTree:
        """The same chain for every row."""
        roots_B1 = state.roots_B[:, None]
        drafted_BN = self._tokens_N.to(roots_B1.device).expand(len(roots_B1), -1)
        return self._shape.tree(torch.cat([roots_B1, drafted_BN], dim=1))


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
    store, facts = Measurements(), _facts(target)
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
    bench = _Bench(target, _fitting(target, _SHORT_CONTEXT, max(sizes)), 1)
    plain = min(bench.time(chains[0]) for _ in range(2))  # the first one finds nothing prepared
    if plain.step >= _SLOW:
        steps = {size: bench.time(chains[size]) for size in few}
    elif plain.step * 2 * len(sizes) * 3 > _SECONDS:
        # So short a step still shows what the first one of its size prepares.
        steps = {size: [bench.time(chains[size]) for _ in range(2)][-1] for size in few[-2:]}
    else:
        bench = _Bench(target, _fitting(target, DEFAULT_CONTEXT, max(sizes)), 1)
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
        bench = _Bench(target, _fitting(target, _SHORT_CONTEXT, 1), 1)
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
    facts = _facts(target) | {"kind": dict(kind), "context": context, "batch_size": batch_size}
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
    """Measure steps with each drafter, interleaved."""
    return _Bench(target, context, batch_size).rounds(drafters, 10 * _SECONDS)


class _Bench:
    """Rows behind which steps are timed that commit nothing. What lies in the cache is all zero,
    which takes as long to read as a text.

    Args:
        target: the target.
        context: tokens in the cache.
        batch_size: rows.
    """

    def __init__(self, target: TargetModel, context: int, batch_size: int) -> None:
        self._target = target
        random = torch.Generator().manual_seed(0)
        ids_BT = torch.randint(target.vocab_size, (batch_size, context), generator=random)
        ids_BT = ids_BT.to(target.device)
        hidden_BTD = torch.randn(batch_size, 2, target.hidden_size, generator=random)
        hidden_BTD = hidden_BTD.to(target.device, target.dtype)
        cache = target.new_cache(batch_size, context + max(SIZES) + 1)
        stop = StopCheck(StoppingCriteriaList())
        rows = [Row(i, batch_size, ids_T, stop) for i, ids_T in enumerate(ids_BT)]
        for row, ids in zip(rows, ids_BT.tolist(), strict=True):
            row.tokens.append(ids[-1])  # as if the last token had just been committed
        if not cache.can_go_back:  # states are made by a token, and read as long whatever they say
            target.hidden(ids_BT[:, :1], cache=cache)
        self._state = decoding_state(rows, cache, [0] * batch_size)
        self._state.lengths = [context] * batch_size
        self._state.hidden_BD = hidden_BTD[:, -1].clone()
        self._state.take_prompt(hidden_BTD)  # as if a step had committed two tokens
        self._state.roots_B = ids_BT[:, -1]
        self._rule = SampleThenMatch(LogitsProcessorList(), do_sample=False)

    def rounds(self, drafters: Mapping[Any, Drafter], limit: float) -> dict[Any, StepSeconds]:
        """Usual seconds of each: all of them in turns, as often as the limit allows."""
        times: dict[Any, list[StepSeconds]] = {name: [] for name in drafters}
        started = time.perf_counter()
        for repeat in range(_ROUNDS + 1):
            if repeat > 1 and time.perf_counter() - started > limit:
                break
            for name, drafter in drafters.items():
                self.time(drafter)  # memory holds what the last one needed
                elapsed = self.time(drafter)
                if repeat:  # the first round warms up
                    times[name].append(elapsed)
        return {name: _usual(each) for name, each in times.items()}

    @torch.inference_mode()
    def time(self, drafter: Drafter) -> StepSeconds:
        """One step's seconds."""
        state = self._state
        before = [len(row.tokens) for row in state.rows]
        started = self._now()
        tree = drafter.propose(state)
        drafted = self._now()
        logits_BNV = state.verify(self._target, tree)
        self._rule(tree, logits_BNV, state.rows)  # waits for the device
        state.forget()
        ended = time.perf_counter()
        for row, length in zip(state.rows, before, strict=True):
            del row.tokens[length:]
        return StepSeconds(ended - started, drafted - started)

    @torch.inference_mode()
    def draft(self, drafter: Drafter) -> float:
        """Seconds of one draft."""
        started = self._now()
        drafter.propose(self._state)
        return self._now() - started

    def _now(self) -> float:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        return time.perf_counter()


def _usual(times: Sequence[StepSeconds]) -> StepSeconds:
    """The lower quartiles: whatever else runs on a machine only ever adds to a time."""
    quarter = (len(times) - 1) // 4
    steps, drafting = (sorted(each) for each in zip(*times, strict=True))
    return StepSeconds(steps[quarter], drafting[quarter])


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


def _facts(target: TargetModel) -> dict[str, Any]:
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
    if target.max_positions is not None:
        context = min(context, target.max_positions - nodes - 1)
    if context < 1:
        raise ValueError(
            f"the target's context of {target.max_positions} leaves no room to measure"
        )
    return context


def room(target: TargetModel) -> int:
    """The most nodes, root included, that trees for this target have: half its context."""
    return 1 << 30 if target.max_positions is None else max(target.max_positions // 2, 2)
