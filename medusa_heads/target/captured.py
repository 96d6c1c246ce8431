"""A target whose steps are CUDA graphs, recorded as they run: ready at once, without a compiler.

Shapes: B batch, N tree nodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from medusa_heads.agreement import TOLERANCE, is_half, relative_error
from medusa_heads.errors import MedusaWarning, first_line
from medusa_heads.machine.devices import free_memory
from medusa_heads.machine.graphs import look
from medusa_heads.machine.recording import Recording, memory_pool, records, standing
from medusa_heads.target.attention import recorded_tree_attention
from medusa_heads.target.compiled import CompiledTarget
from medusa_heads.target.features import CapturedHere
from medusa_heads.target.static_cache import StaticRecurrentCache, StaticRowCache
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Made = TypeVar("Made")

_OWN = ("medusa_heads", "transformers.")  # whose hooks note what passes, and change nothing


def captures(target: TargetModel) -> bool:
    """Whether steps of this target can be recorded, as far as is known before one is: it lies on
    one GPU as it is."""
    model: Any = target.model
    moved = hasattr(model, "_hf_hook") or getattr(model, "hf_device_map", None)
    return records(target.device) and not moved and getattr(model, "hf_quantizer", None) is None


class CapturedTarget(CompiledTarget):
    """A target that verifies trees over a cache of fixed size, as a CompiledTarget does, by CUDA
    graphs of its own kernels. Where something in it cannot be recorded, it goes on without.

    Attributes:
        gave_up: a forward of it could not be recorded.
        lacked_memory: that the last recording could not be made, was for want of memory.
    """

    _stacked = True
    _captures = CapturedHere

    def __init__(self, model: PreTrainedModel, features: tuple[int, ...] = ()) -> None:
        # By its cache, for good; by shapes.
        self._recorded: WeakKeyDictionary[StaticRowCache, dict[Any, _Forward]] = WeakKeyDictionary()
        self._stands: tuple[Any, ...] = ()
        self._seen: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
        self._pool: Any = None
        self.gave_up = self.lacked_memory = False
        super().__init__(model, "eager", features, whole_steps=True)
        # With hooks of the model itself.
        self._forward = self._compiled = self.in_one_graph(self.model)

    def serves(self, batch_size: int, slots: int) -> bool:
        """Whether texts of so many rows and slots are recorded as things are: nothing is done to
        the model that recordings leave out, and their cache takes half of the memory at most."""
        if self.gave_up or not records(self.device) or torch.is_autocast_enabled(self.device.type):
            return False
        if any(map(_has_hooks, self.model.modules())):
            return False
        capacity = self.capacity(slots)
        kind = batch_size, capacity, self.dtype, self.device
        of_slots = [c.held_bytes / (k[0] * k[1]) for k, c in self._caches.items() if c.held_bytes]
        free = free_memory(self.device)
        if kind in self._caches or not of_slots or free is None:
            return True
        return batch_size * capacity * min(of_slots) <= free / 2

    def has_changed(self, reader: object) -> bool:
        """Whether the model is another one than when this reader last asked, with other weights,
        switches or hooks."""
        before, self._seen[reader] = self._seen.get(reader, self._stands), self._stands
        return before != self._stands

    @contextmanager
    def capture_hidden(self) -> Iterator[Callable[[], Tensor]]:
        """See TargetModel; a text begins."""
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
        return CapturedTarget(self.model, features)

    def in_one_graph(self, function: Callable[..., Made]) -> Callable[..., Made]:
        """The function, to be called by `run`."""
        return partial(function)

    @property
    def compiles(self) -> bool:
        """False within `uncompiled`, where a forward could not be recorded, and where the model has
        been moved off a GPU."""
        return super().compiles and not self.gave_up and records(self.device)

    def begin_step(self) -> None:
        """Nothing: what recordings return is used up before the next step."""

    def run(self, compiled: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
        """Call what `in_one_graph` made."""
        with recorded_tree_attention():
            return compiled(*args, **kwargs)

    def recording(self, function: Callable[[], Any]) -> Recording | None:
        """Of a function that has been called; None where it cannot be recorded, which a warning
        says."""
        self._pool = self._pool or memory_pool()
        try:
            made = Recording(function, self.device, self._pool)
        except RuntimeError as error:
            self._pool = None  # of which nobody knows what became
            self.lacked_memory = isinstance(error, torch.OutOfMemoryError)
            self.warn(first_line(error))
            return None
        made.let_go(self.model)
        return made

    def warn(self, reason: str) -> None:
        """Say that something is decoded without recordings, and why."""
        reason = f"decoding goes on without CUDA graphs: {reason}"
        warnings.warn(reason, MedusaWarning, stacklevel=3)

    def _first(
        self, inputs: dict[str, Any], given: list[Tensor]
    ) -> tuple[Tensor, Callable[[list[Tensor]], list[Tensor]] | None]:
        logits_BNV = self._checked(inputs)
        cache: StaticRowCache = inputs["past_key_values"]
        known, shapes = self._recorded.setdefault(cache, {}), tuple(map(look, given))
        if shapes not in known and self.compiles:
            captured = self._captured.tensors(self.features)
            made = self._made(inputs, given, [logits_BNV, *captured])
            self._captured.put(self.features, captured)
            if made is None:
                self.gave_up = not self.lacked_memory
            else:
                known[shapes] = made
        return logits_BNV, known.get(shapes)

    def _made(
        self, inputs: dict[str, Any], given: list[Tensor], expected: list[Tensor]
    ) -> _Forward | None:
        """A recording of this forward, if it can be made and does the same."""
        places = [tensor.clone() for tensor in given]
        found = {id(tensor): place for tensor, place in zip(given, places, strict=True)}
        there = _in_place(inputs, found)

        def forward() -> list[Tensor]:
            logits_BNV = self._checked(there)
            return [logits_BNV, *self._captured.tensors(self.features)]

        if (recording := self.recording(forward)) is None:
            return None
        if not isinstance(inputs["past_key_values"], StaticRecurrentCache):
            recording.replay()  # whose states would read these tokens twice
            for got, known in zip(recording.result, expected, strict=True):
                got_TV, known_TV = (each.flatten(0, -2).float() for each in (got, known))
                if relative_error(got_TV, known_TV) > TOLERANCE[is_half(self.dtype)]:
                    self.warn("a recorded forward says something else than the model")
                    return None
        return _Forward(recording, places)


def _has_hooks(module: torch.nn.Module) -> bool:
    """Of others than ours: whatever they do, recordings do without it."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return not all(str(getattr(hook, "__module__", "")).startswith(_OWN) for hook in hooks)


class _Forward:
    """A recorded forward of what is given."""

    def __init__(self, recording: Recording, places: list[Tensor]) -> None:
        self._recording, self._places = recording, places

    def __call__(self, given: list[Tensor]) -> list[Tensor]:
        torch._foreach_copy_(self._places, given)
        self._recording.replay()
        result: list[Tensor] = self._recording.result
        return result


def _in_place(inputs: Any, found: dict[int, Tensor]) -> Any:
    """The same inputs with other tensors."""
    if isinstance(inputs, dict):
        return {name: _in_place(value, found) for name, value in inputs.items()}
    return found.get(id(inputs), inputs)
