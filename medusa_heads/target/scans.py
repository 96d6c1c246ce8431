"""Layers of Mamba go on from the state they are in, however many tokens they read, as they go on by
one token at a time.

Of Mamba 1 transformers reads one token from the state, but begins every scan over several of them
anew. Within `scans_go_on` a scan takes its tokens one after the other, each with the function that
reads one; what surrounds the scan, and the weights with it, is still read once for all tokens. Of
Mamba 2 it limits the time steps of several tokens alone.

Shapes: B rows, T tokens, I channels, S numbers of state a channel.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import cycle
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

_SCAN, _ONE_TOKEN = "mamba_selective_scan", "mamba_selective_state_update"

# The states of a forward's scans, in the order in which its layers, and the heads in them, scan.
_STATES: ContextVar[Iterator[Tensor] | None] = ContextVar("states", default=None)
# Looked for once: a large model has thousands of modules, and a step little time.
_mixers: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


@contextmanager
def scans_go_on(model: nn.Module, layers: Sequence[Any]) -> Iterator[None]:
    """Within the block, this model's scans go on from the states in these layers of a cache, which
    they change in place; nothing changes where there are no scans, or no states yet."""
    states = [
        head_BIS
        for mixer in _scanning(model)
        if (state := layers[mixer.layer_idx].recurrent_states[0]) is not None
        for head_BIS in (state.unbind(1) if state.ndim == 4 else [state])  # Zamba's heads
    ]
    token = _STATES.set(cycle(states) if states else None)
    try:
        yield
    finally:
        _STATES.reset(token)


def has_scans(model: nn.Module) -> bool:
    """Whether layers of this model scan as those of Mamba 1."""
    return bool(_scanning(model))


def _scanning(model: nn.Module) -> list[Any]:
    if model not in _mixers:
        found = [each for each in model.modules() if hasattr(each, "A_log")]
        _mixers[model] = [each for each in found if _SCAN in _code(each)]
        for mixer in _mixers[model]:
            code = _code(mixer)
            if not hasattr(code[_SCAN], "goes_on"):
                code[_SCAN] = _going_on(code[_SCAN], code[_ONE_TOKEN])
    return _mixers[model]


def _code(module: nn.Module) -> dict[str, Any]:
    return vars(sys.modules[type(module).__module__])


def _going_on(scan: Callable[..., Any], read_one: Callable[..., Tensor]) -> Callable[..., Any]:
    def go_on(
        hidden_BIT: Tensor, dt_BIT: Tensor, A_IS: Tensor, B_BST: Tensor, C_BST: Tensor, **how: Any
    ) -> Any:
        states = _STATES.get()
        if states is None:
            return scan(hidden_BIT, dt_BIT, A_IS, B_BST, C_BST, **how)
        state_BIS, D_I, z_BIT = next(states), how["D"].to(hidden_BIT.dtype), how["z"]
        read = [
            read_one(
                state_BIS,
                hidden_BIT[..., t],
                dt_BIT[..., t],
                A_IS,
                B_BST[..., t],
                C_BST[..., t],
                D_I,
                z=z_BIT[..., t],
                dt_bias=how["delta_bias"],
                dt_softplus=how["delta_softplus"],
            )
            for t in range(hidden_BIT.shape[-1])
        ]
        return torch.stack(read, dim=-1), state_BIS

    go_on.goes_on = True  # type: ignore[attr-defined]
    return go_on


class _Unlimited:
    """The layers of one model whose time steps transformers limits, and what their limits were."""

    # Looked for once: a large model has thousands of modules, and a step little time.
    _known: ClassVar[weakref.WeakKeyDictionary[nn.Module, _Unlimited]] = weakref.WeakKeyDictionary()
    lock: ClassVar[Lock] = Lock()  # threads may decode with one model

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[Any] = [m for m in model.modules() if hasattr(m, "time_step_limit")]
        self._limits: list[Any] = []
        self._users = 0

    @classmethod
    def of(cls, model: nn.Module) -> _Unlimited:
        """What is known of this model."""
        if model not in cls._known:
            cls._known[model] = cls(model)
        return cls._known[model]

    def enter(self) -> None:
        """One more block has begun; the first takes the limits away."""
        if not self._users:
            self._limits = [module.time_step_limit for module in self._modules]
            for module in self._modules:
                module.time_step_limit = (0.0, float("inf"))
        self._users += 1

    def leave(self) -> None:
        """One block fewer; the last puts the limits back."""
        self._users -= 1
        if not self._users:
            for module, limit in zip(self._modules, self._limits, strict=True):
                module.time_step_limit = limit


@contextmanager
def time_steps_of_one_token(model: nn.Module) -> Iterator[None]:
    """Within the block, layers of Mamba 2 take the time steps of several tokens as they take those
    of one: without the limits that transformers sets for several tokens alone, which would make
    another text of them than one token at a time. Blocks of several threads may overlap."""
    with _Unlimited.lock:
        unlimited = _Unlimited.of(model)
        unlimited.enter()
    try:
        yield
    finally:
        with _Unlimited.lock:
            unlimited.leave()
