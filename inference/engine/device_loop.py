"""The decoding loop as a GPU wants it: a step is one function of tensors, and so one graph.

Drafting, verification, acceptance, the ends of rows, the cache: all of it happens on the device, on
tensors of fixed shapes. The host starts step after step and reads a few figures of each, on a GPU a
step late: it waits for no step that it has just begun. They tell whether any row goes on (rows that
have ended stand still meanwhile), and how many nodes the next step had best verify.

Of what a text asks for, some things have no place in such a step; `begin` says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from medusa_heads.errors import UnsupportedArchitecture, warn
from medusa_heads.inference.acceptance import AcceptanceRule, SampleThenMatch
from medusa_heads.inference.acceptance.at_once import deepest_path, draw_all, kinds
from medusa_heads.inference.acceptance.lossless import check_drawn
from medusa_heads.inference.adapt.buckets import Buckets
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.device_recurrent import RecurrentDeviceState
from medusa_heads.inference.engine.device_state import ENDS, DeviceState
from medusa_heads.inference.engine.reading import Reading
from medusa_heads.inference.engine.rows import Ends
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.machine.graphs import noted
from medusa_heads.machine.recording import Recording, standing
from medusa_heads.target.graphs.captured import CapturedTarget
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.graphs.static_cache import StaticRecurrentCache, StaticRowCache
from medusa_heads.target.scans import time_steps_of_one_token
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.dynamic_tree import likeliest

_MOST_RECORDED = 32  # steps of one drafter and state: numbers of nodes, kinds of processors


@dataclass
class _Recorded:
    stands: tuple[Any, ...]  # what must stand for it to serve
    recording: Recording
    before: _Recorded | None = None  # which it takes the place of, and which serves where it fails
    serves: bool = False
    is_last: bool = False  # nothing takes its place


Step = Callable[[CompiledTarget, Drafter, DeviceState, int, int | None], None]


def _step(
    target: CompiledTarget, drafter: Drafter, state: DeviceState, levels: int, size: int | None
) -> None:
    tree, expected_BN = drafter.propose(state), None
    if size is not None:
        tree, expected_BN = likeliest(tree, size + 1)
    logits_BNV, hidden_BNX = state.read(target, tree)
    drafter.observe(tree, logits_BNV)
    drawn_BN = draw_all(tree, logits_BNV, state.processors, state.noise_on_device, state.seen_BV)
    path = deepest_path(tree, drawn_BN, min(levels, tree.num_nodes - 1))
    state.take(path, hidden_BNX, expected_BN)


class DeviceLoop:
    """Decodes texts of one target; what is compiled for one serves the next of its shape."""

    def __init__(self, target: CompiledTarget) -> None:
        # Of which drafters, with processors of which kinds, a step was no graph.
        self._fails: WeakKeyDictionary[Drafter, set[tuple[Any, ...]]] = WeakKeyDictionary()
        self._compiled: Step = target.in_one_graph(_step)
        self._states: WeakKeyDictionary[StaticRowCache, dict[Any, DeviceState]] = (
            WeakKeyDictionary()
        )
        # By the state's shapes.
        self._recorded: WeakKeyDictionary[
            DeviceState, WeakKeyDictionary[Drafter, dict[Any, _Recorded]]
        ] = WeakKeyDictionary()
        self._unrecorded: set[Any] = set()  # of one text
        self._step_seconds = 0.0  # in the last text
        self._buckets: WeakKeyDictionary[
            Drafter, WeakKeyDictionary[DeviceState, dict[Any, Buckets]]
        ] = WeakKeyDictionary()

    def can(self, drafter: Drafter, rule: SampleThenMatch) -> bool:
        """Whether a step is one graph, as far as is known."""
        return kinds(rule.processors) not in self._fails.get(drafter, ())

    def decode(
        self,
        target: CompiledTarget,
        drafter: Drafter,
        rule: SampleThenMatch,
        state: DecodingState,
        ends: Ends,
        stats: GenerationStats,
    ) -> None:
        """Decode all rows to their ends, within `capture_hidden`; or none of them, where a step is
        not one graph after all. Raises ValueError: the processed scores of a next token are no
        distribution."""
        cache, levels = state.cache, drafter.levels
        assert isinstance(cache, StaticRowCache) and levels is not None
        self._unrecorded.clear()
        if isinstance(target, CapturedTarget) and target.has_changed(self):
            self._recorded.clear()
        on_device = self._state_of(target, drafter, state, levels)
        with stats.phase("draft"):
            drafter.prepare(state)
            # The drafter's own: held by the state, they would outlive it.
            on_device.memories = drafter.memories.setdefault(on_device, {})
            on_device.begin(state, ends, rule.processors)
            state.memories.clear()  # copied by now, or to be made again
            buckets = self._buckets_of(drafter, on_device, rule)
        target.forget_hidden()
        try:
            with stats.phase("step"), time_steps_of_one_token(target.model):
                reading = Reading(on_device.figures, levels)
                again: dict[Any, Callable[[], object]] = {}  # by graph
                while reading.goes_on(buckets):
                    if state.rows[0].streams:  # the only one
                        check_drawn(reading.fresh)
                        state.rows[0].take(reading.fresh)
                    size = None if buckets is None else buckets.next()
                    nodes = drafter.num_nodes if size is None else size + 1
                    graph = size, on_device.width(nodes, reading.again)
                    if usual := graph in again:
                        target.begin_step()
                        again[graph]()
                    else:
                        few = target.packed_for(graph[1] * len(on_device.roots_B))
                        with cache.tree_slots(None, graph[1], on_device.roots_B.device), few:
                            step = self._first_step(target, drafter, on_device, levels, size)
                        if step is not None:
                            again[graph] = step
                    reading.begins(usual)
                    reading.sizes.append(size if usual or not target.compiles else None)
                state.lengths = on_device.end()
                self._step_seconds = reading.usual_seconds or self._step_seconds
        except UnsupportedArchitecture as error:
            if int(on_device.forwards):  # what a step has done is wrong
                raise
            self._fails.setdefault(drafter, set()).add(kinds(rule.processors))
            del stats.seconds["step"]  # there was none
            drafter.memories.pop(on_device, None)
            how = "recorded" if isinstance(target, CapturedTarget) else "compiled"
            warn(f"steps are {how} in parts, since the whole is no graph: {error}")
            return
        finally:
            del on_device.cache, on_device.memories
        _hand_over(on_device, state, stats)

    def _state_of(
        self, target: CompiledTarget, drafter: Drafter, state: DecodingState, levels: int
    ) -> DeviceState:
        """What goes on from a text's state, as it did from earlier ones of its shape."""
        cache, batch, nodes = state.cache, len(state.rows), drafter.num_nodes
        assert isinstance(cache, StaticRowCache)
        recurrent = isinstance(cache, StaticRecurrentCache)
        again = drafter.most_again(batch) if recurrent and nodes > 1 else 0
        states, shape = self._states.setdefault(cache, {}), (levels, nodes, again)
        if shape not in states:
            like = state, levels, nodes, target.vocab_size
            states[shape] = RecurrentDeviceState(*like, again) if recurrent else DeviceState(*like)
        return states[shape]

    def _first_step(
        self,
        target: CompiledTarget,
        drafter: Drafter,
        state: DeviceState,
        levels: int,
        size: int | None,
    ) -> Callable[[], object] | None:
        """Take a step that is the first of its graph in a text; returns what takes it again."""
        if isinstance(target, CapturedTarget):
            return self._recorded_step(target, drafter, state, levels, size)
        if not target.compiles:
            _step(target, drafter, state, levels, size)
            return None
        with state.compared(target, drafter), noted() as calls:
            target.run(self._compiled, target, drafter, state, levels, size)
        # What is still to be compared is not taken again as it was.
        return calls[0].whole() if len(calls) == 1 and state.is_compared(drafter) else None

    def _recorded_step(
        self,
        target: CapturedTarget,
        drafter: Drafter,
        state: DeviceState,
        levels: int,
        size: int | None,
    ) -> Callable[[], object] | None:
        of_drafter = self._recorded.setdefault(state, WeakKeyDictionary())
        known = of_drafter.setdefault(drafter, {})
        key = levels, size, state.cache.slots_N.data_ptr(), kinds(state.processors), state.drawing
        step = partial(target.run, self._compiled, target, drafter, state, levels, size)
        if not target.compiles or key in self._unrecorded:
            step()
            return None
        one = known.get(key)
        if one is None or one.stands != standing(drafter, *state.parts):
            step()
            if len(known) == _MOST_RECORDED:
                del known[next(iter(known))]
            if (recording := target.recording(step)) is not None:
                stands = standing(drafter, *state.parts)
                known[key] = _Recorded(stands, recording)
            else:
                self._unrecorded.add(key)
                if not target.lacked_memory:  # then forwards alone are, from the next text on
                    self._fails.setdefault(drafter, set()).add(kinds(state.processors))
            return None
        spent = one.recording.replays * self._step_seconds
        is_last = one.is_last or not target.parts_pay(spent)
        if one.serves and not is_last:
            program = target.with_compiled_parts(step)
            if program and (recording := target.recording(program)) is not None:
                known[key] = _Recorded(one.stands, recording, before=one, is_last=True)
            one.is_last = target.parts_pay(spent)  # or there was no memory, until the next text
            return None
        if one.serves:
            one.recording.replay()
            return one.recording.replay
        if agrees := one.recording.agrees(step):
            one.serves, one.before = True, None
            return one.recording.replay if is_last else None
        if agrees is False and one.before is not None:
            known[key] = one.before
        elif agrees is False:
            del known[key]
            self._unrecorded.add(key)
            if agreements := one.recording.agreements:  # or there was no memory to compare
                self._fails.setdefault(drafter, set()).add(kinds(state.processors))
                said = ", ".join(f"{agreement:.3f}" for agreement in agreements)
                target.warn(f"a recorded step has not done what the step itself does: {said} of it")
        return None

    def _buckets_of(
        self, drafter: Drafter, state: DeviceState, rule: SampleThenMatch
    ) -> Buckets | None:
        """What chooses the number of nodes, by earlier texts that had the same graphs."""
        if not drafter.sizes:
            return None
        known = self._buckets.setdefault(drafter, WeakKeyDictionary()).setdefault(state, {})
        key = state.drawing, kinds(rule.processors)
        if key not in known:
            known[key] = Buckets(drafter.sizes)
        return known[key]


def _hand_over(on_device: DeviceState, state: DecodingState, stats: GenerationStats) -> None:
    """To the rows, the state and the statistics what came of it."""
    written, counts = on_device.written(), on_device.steps_A.tolist()
    for row, tokens in zip(state.rows, written, strict=True):
        row.take(tokens[len(row.tokens) :])
        row.done = True
    for row in state.rows:
        check_drawn(row.tokens)
    state.rows = []
    stats.steps += sum(counts)
    stats.forwards += int(on_device.forwards)
    stats.accepted.update({accepted: count for accepted, count in enumerate(counts) if count})


# Which neither keep a target, nor a cache beyond a text.
_loops: WeakKeyDictionary[TargetModel, DeviceLoop] = WeakKeyDictionary()


def device_loop(
    target: TargetModel,
    drafter: Drafter,
    rule: AcceptanceRule,
    state: DecodingState,
    ends: Ends | None,
) -> Callable[[GenerationStats], None] | None:
    """What decodes this text in steps that are one graph; None where something in it needs the
    host: a drafter that looks at tokens, processors that read the text, a tree from a recurrent
    state, or what `ends` knows nothing of."""
    if not isinstance(target, CompiledTarget) or not target.whole_steps or drafter.levels is None:
        return None
    if not isinstance(rule, SampleThenMatch) or not rule.draws_at_once(state.rows):
        return None
    if ends is None or len(ends.tokens) > ENDS or state.last_position is None:
        return None
    if not state.rows:
        return None
    chains = drafter.levels == drafter.num_nodes - 1
    if isinstance(state.cache, StaticRecurrentCache) and (target.loses_states or not chains):
        return None
    if target not in _loops:
        _loops[target] = DeviceLoop(target)
    loop = _loops[target]
    if not loop.can(drafter, rule):
        return None
    return partial(loop.decode, target, drafter, rule, state, ends)
