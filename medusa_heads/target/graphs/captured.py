"""A target whose steps are CUDA graphs, recorded as they run: ready at once, without a compiler.

Shapes: B batch, N tree nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from medusa_heads.agreement import TOLERANCE, is_half, relative_error
from medusa_heads.errors import first_line, warn
from medusa_heads.machine.devices import free_memory
from medusa_heads.machine.graphs import look
from medusa_heads.machine.programs import Program, traced
from medusa_heads.machine.recording import MemoryPool, Recording, only_notes, records, standing
from medusa_heads.target.attention import recorded_tree_attention
from medusa_heads.target.features import CapturedHere
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.graphs.joined import join_products
from medusa_heads.target.graphs.static_cache import StaticRecurrentCache, StaticRowCache
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Made = TypeVar("Made")

# What compiling takes, as long as nobody knows, and at least; and what it saves: 7B on an H100.
_SECONDS, _LEAST_SECONDS, _SAVED = 10.0, 1.0, 0.25


def captures(target: TargetModel) -> bool:
    """Whether steps of this target can be recorded, as far as is known before one is: it lies on
    one GPU as it is."""
    model: Any = target.model
    moved = hasattr(model, "_hf_hook") or getattr(model, "hf_device_map", None)
    return records(target.device) and not moved and getattr(model, "hf_quantizer", None) is None


def as_it_is(target: TargetModel) -> TargetModel:
    """The same without recordings."""
    if isinstance(target, CapturedTarget):
        return TargetModel(target.model).with_features(target.features)
    return target


# Bytes that a slot of a cache takes, by model: each view of one has caches of its own.
_slot_bytes: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


class CapturedTarget(CompiledTarget):
    """A target that verifies trees over a cache of fixed size, as a CompiledTarget does, by CUDA
    graphs of its own kernels. Where something in it cannot be recorded, it goes on without.

    Args:
        parts: a backend of torch.compile, by which small operations that come again and again
            become one kernel; None: they stay as they are.
        late: whether that waits until it pays, and is done for whole steps alone.

    Attributes:
        gave_up: a forward of it could not be recorded.
        is_decoding: a text, which has its cache.
        lacked_memory: that the last recording could not be made, was for want of memory.
    """

    _stacked = True
    _captured_kind = CapturedHere

    def __init__(
        self,
        model: PreTrainedModel,
        features: tuple[int, ...] = (),
        parts: str | Callable[..., Any] | None = None,
        late: bool = False,
    ) -> None:
        self._parts, self._late, self._seconds = parts, late, _SECONDS
        self._asked = None if late else "capture" if parts is None else "kernels", parts
        self._known: dict[str, Any] = {}  # what has been compiled
        # By its cache, for good; by shapes.
        self._recorded: WeakKeyDictionary[StaticRowCache, dict[Any, _Forward]] = WeakKeyDictionary()
        self._stands: tuple[Any, ...] = ()
        self._seen: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
        self._pool = MemoryPool()
        self._short: set[Any] = set()  # what there was no memory for, of this text: shapes, parts
        self.gave_up = self.lacked_memory = self.is_decoding = False
        super().__init__(model, "eager", features, whole_steps=True)
        # With hooks of the model itself.
        self._forward = self._compiled = self.in_one_graph(self.model)

    def serves(self, batch_size: int, slots: int) -> bool:
        """Whether texts of so many rows and slots are recorded as things are: nothing is done to
        the model that recordings leave out, and their cache takes half of the memory at most."""
        if self.gave_up or not self.is_there or torch.is_autocast_enabled(self.device.type):
            return False
        hooks = torch.nn.modules.module
        hooked = hooks._global_forward_hooks or hooks._global_forward_pre_hooks
        # In the middle of a text somebody may ask for another.
        if hooked or self.is_decoding or any(map(_has_hooks, self.model.modules())):
            return False
        capacity, of_slot = self.capacity(slots), _slot_bytes.get(self.model)
        kind = batch_size, capacity, self.dtype, self.device
        if kind in self._caches or of_slot is None:
            return True
        free = free_memory(self.device)  # which takes a while, and not for every text
        return free is None or batch_size * capacity * of_slot <= free / 2

    def has_changed(self, reader: object) -> bool:
        """Whether the model has other weights, switches or hooks than when this reader asked."""
        before, self._seen[reader] = self._seen.get(reader, self._stands), self._stands
        return before != self._stands

    @contextmanager
    def capture_hidden(self) -> Iterator[Callable[[], Tensor]]:
        """See TargetModel; a text begins."""
        self._short.clear()
        before, self._stands = self._stands, standing(self.model)
        if before != self._stands:
            self._recorded.clear()
        captured = self._captured
        assert isinstance(captured, CapturedHere)
        captured.thread = get_ident()
        try:
            with super().capture_hidden() as wide:
                yield wide
        finally:
            captured.thread = None

    def _like(self, features: tuple[int, ...]) -> CompiledTarget:
        view = CapturedTarget(self.model, features, self._parts, self._late)
        view._asked, view._known = self._asked, self._known
        return view

    def in_one_graph(self, function: Callable[..., Made]) -> Callable[..., Made]:
        """The function, to be called by `run`."""
        return partial(function)

    @property
    def compiles(self) -> bool:
        """False within `uncompiled`, where a forward could not be recorded, and where the model has
        been moved off a GPU."""
        return super().compiles and not self.gave_up and self.is_there

    @property
    def is_there(self) -> bool:
        return records(self.device)  # which it may have left

    def begin_step(self) -> None:
        """Nothing: what recordings return is used up before the next step."""

    def run(self, compiled: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
        """Call what `in_one_graph` made."""
        with recorded_tree_attention():
            made = compiled(*args, **kwargs)
        if self.model not in _slot_bytes:
            for (rows, capacity, *_), cache in self._caches.items():
                if cache.held_bytes:
                    _slot_bytes[self.model] = cache.held_bytes / (rows * capacity)
        return made

    def is_asked_by(self, word: object, backend: str | Callable[..., Any]) -> bool:
        """Whether it is what somebody gets who says this word."""
        return self._asked == (word, backend if word == "kernels" else None)

    @property
    def compiles_parts(self) -> bool:
        """Whether recordings are of compiled parts from the start, where they can be."""
        return self._parts is not None and not self._late

    def parts_pay(self, spent: float) -> bool:
        """Whether it pays to compile the parts of what has been replayed for so many seconds, see
        LateCompiling; not in a text in which there was no memory for that."""
        may = self._parts is not None and "parts" not in self._short
        return may and spent * _SAVED >= self._late * self._seconds

    def with_compiled_parts(self, function: Callable[[], Any]) -> Program | None:
        """Call a function, and return the same with its parts compiled; None where no compiler
        works, which a warning says, and then nothing is compiled any more."""
        assert self._parts is not None
        program, began = traced(function), time.perf_counter()
        join_products(program)
        try:
            compiled = program.compiled(torch._dynamo.lookup_backend(self._parts), self._known)
        except Exception as error:  # a compiler may fail in ways of its own
            self._as_they_are(error)
            return None
        self._seconds = max(time.perf_counter() - began, _LEAST_SECONDS)
        return compiled

    def _as_they_are(self, error: Exception) -> None:
        if isinstance(error, torch.OutOfMemoryError):  # there may be memory for others, and later
            self._short.add("parts")
        else:
            self._parts = None
            warn(f"decoding goes on by kernels as they are: {first_line(error)}", above=2)

    def recording(self, function: Callable[[], Any]) -> Recording | None:
        """Of a function that has been called; None, as a warning says, where it cannot be made."""
        self.lacked_memory = False
        try:
            made = Recording(function, self.device, self._pool)
        except Exception as error:
            self._pool = MemoryPool()  # of the one before nobody knows what became
            self.lacked_memory = isinstance(error, torch.OutOfMemoryError)
            if isinstance(function, Program):  # compiled parts may fail in ways of their own
                self._as_they_are(error)
            elif isinstance(error, RuntimeError):
                self.warn(first_line(error))
            else:
                raise
            return None
        made.let_go(self.model)
        return made

    def warn(self, reason: str) -> None:
        """Say that something is decoded without recordings, and why."""
        warn(f"decoding goes on without CUDA graphs: {reason}", above=2)

    def _first(
        self, inputs: dict[str, Any], given: list[Tensor]
    ) -> tuple[Tensor, Callable[[list[Tensor]], list[Tensor]] | None]:
        logits_BNV = self._checked(inputs)
        cache: StaticRowCache = inputs[self.cache_argument]
        known, shapes = self._recorded.setdefault(cache, {}), tuple(map(look, given))
        if shapes not in known and self.compiles and shapes not in self._short:
            captured = self._captured.tensors(self.features)
            made = self._made(inputs, given, [logits_BNV, *captured])
            self._captured.put(self.features, captured)
            if made is not None:
                known[shapes] = made
            elif self.lacked_memory:
                self._short.add(shapes)
            else:
                self.gave_up = True
        return logits_BNV, known.get(shapes)

    def _made(
        self, inputs: dict[str, Any], given: list[Tensor], expected: list[Tensor]
    ) -> _Forward | None:
        """A recording of this forward, if it can be made and does the same."""
        places = [tensor.clone() for tensor in given]
        found = {id(tensor): place for tensor, place in zip(given, places, strict=True)}
        there = tree_map(lambda leaf: found.get(id(leaf), leaf), inputs)

        def forward() -> list[Tensor]:
            logits_BNV = self._checked(there)
            return [logits_BNV, *self._captured.tensors(self.features)]

        if (recording := self.recording(forward)) is None:
            return None
        if isinstance(inputs[self.cache_argument], StaticRecurrentCache):
            return _Forward(recording, places)  # whose states would read these tokens twice
        if not self._says(recording, expected):
            self.warn("a recorded forward says something else than the model")
            return None
        if self.compiles_parts and (program := self.with_compiled_parts(forward)) is not None:
            compiled = self.recording(program)
            if compiled is not None and self._says(compiled, expected):
                recording = compiled
        return _Forward(recording, places)

    def _says(self, recording: Recording, expected: list[Tensor]) -> bool:
        recording.replay()
        pairs = [
            [each.flatten(0, -2).float() for each in pair]
            for pair in zip(recording.result, expected, strict=True)
        ]
        return all(relative_error(*pair) <= TOLERANCE[is_half(self.dtype)] for pair in pairs)


def _has_hooks(module: torch.nn.Module) -> bool:
    """Of others than ours: whatever they do, recordings do without it."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return not all(map(only_notes, hooks))


class _Forward:
    """A recorded forward of what is given."""

    def __init__(self, recording: Recording, places: list[Tensor]) -> None:
        self._recording, self._places = recording, places

    def __call__(self, given: list[Tensor]) -> list[Tensor]:
        torch._foreach_copy_(self._places, given)
        self._recording.replay()
        return self._recording.result
