"""A target whose steps are CUDA graphs, recorded as they run: ready at once, without a compiler.

Shapes: B batch, N tree nodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from medusa_heads.agreement import TOLERANCE, is_half, relative_error
from medusa_heads.errors import MedusaWarning, first_line
from medusa_heads.machine.graphs import look
from medusa_heads.machine.recording import Recording, memory_pool, records, standing
from medusa_heads.target.attention import recorded_tree_attention
from medusa_heads.target.compiled import CompiledTarget
from medusa_heads.target.static_cache import StaticRecurrentCache, StaticRowCache
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Made = TypeVar("Made")


def captures(target: TargetModel) -> bool:
    """Whether steps of this target can be recorded, as far as is known before one is: it lies on
    one GPU as it is."""
    model: Any = target.model
    moved = hasattr(model, "_hf_hook") or getattr(model, "hf_device_map", None)
    return records(target.device) and not moved and getattr(model, "hf_quantizer", None) is None


class CapturedTarget(CompiledTarget):
    """A target that verifies trees over a cache of fixed size, as a CompiledTarget does, by CUDA
    graphs of its own kernels. Where something in it cannot be recorded, it goes on without."""

    _stacked = True

    def __init__(self, model: PreTrainedModel, features: tuple[int, ...] = ()) -> None:
        # By its cache, for good; by shapes, with what must stand for it to serve.
        self._recorded: WeakKeyDictionary[StaticRowCache, dict[Any, tuple[Any, _Forward]]] = (
            WeakKeyDictionary()
        )
        super().__init__(model, "eager", features, whole_steps=True)

    @cached_property
    def _pool(self) -> Any:
        return memory_pool()

    def _like(self, features: tuple[int, ...]) -> CompiledTarget:
        return CapturedTarget(self.model, features)

    def in_one_graph(self, function: Callable[..., Made]) -> Callable[..., Made]:
        """The function, to be called by `run`."""
        return partial(function)

    @property
    def compiles(self) -> bool:
        """False within `uncompiled`, where something could not be recorded, and where the model has
        been moved off a GPU."""
        return super().compiles and records(self.device)

    def begin_step(self) -> None:
        """Nothing: what recordings return is used up before the next step."""

    def run(self, compiled: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
        """Call what `in_one_graph` made."""
        with recorded_tree_attention():
            return compiled(*args, **kwargs)

    def recording(self, function: Callable[[], Any]) -> Recording | None:
        """Of a function that has been called; None where it cannot be recorded, and then no other
        will be."""
        try:
            return Recording(function, self.device, self._pool)
        except RuntimeError as error:
            self.record_no_more(first_line(error))
            return None

    def record_no_more(self, reason: str) -> None:
        """Say so; from now on steps are taken as they are."""
        self._forward = self.model.forward
        reason = f"decoding goes on without CUDA graphs: {reason}"
        warnings.warn(reason, MedusaWarning, stacklevel=3)

    def _first(
        self, inputs: dict[str, Any], given: list[Tensor]
    ) -> tuple[Tensor, Callable[[list[Tensor]], list[Tensor]] | None]:
        logits_BNV = self._checked(inputs)
        cache: StaticRowCache = inputs["past_key_values"]
        known, shapes = self._recorded.setdefault(cache, {}), tuple(map(look, given))
        states = cache.states() if isinstance(cache, StaticRecurrentCache) else []
        stands = standing(self.model, *states, *cache.row_buffers)
        if shapes in known and known[shapes][0] == stands:
            return logits_BNV, known[shapes][1]
        places = [tensor.clone() for tensor in given]
        found = {id(tensor): place for tensor, place in zip(given, places, strict=True)}
        there = _in_place(inputs, found)

        def forward() -> list[Tensor]:
            logits_BNV = self._checked(there)
            return [logits_BNV, *self._captured.tensors(self.features)]

        captured = self._captured.tensors(self.features)
        recording = self.recording(forward)
        self._captured.put(self.features, captured)
        if recording is None:
            return logits_BNV, None
        if not states:  # which would read these tokens twice
            recording.replay()
            for got, expected in zip(recording.result, [logits_BNV, *captured], strict=True):
                got_TV, expected_TV = (each.flatten(0, -2).float() for each in (got, expected))
                if relative_error(got_TV, expected_TV) > TOLERANCE[is_half(self.dtype)]:
                    self.record_no_more("a recorded forward says something else than the model")
                    return logits_BNV, None
        made = _Forward(recording, places)
        known[shapes] = stands, made
        return logits_BNV, made


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
