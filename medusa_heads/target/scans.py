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
from typing import Any

import torch
from torch import Tensor, nn

from medusa_heads.target.attention import reads_tree

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


class OfThread:
    """In a class of modules, a number that each module has in its dictionary, and in whose place
    some threads read another one: others may run the same modules meanwhile.

    Args:
        name: of the number.
        read: what this thread reads of a module that has this number of its own.
    """

    def __init__(self, name: str, read: Callable[[nn.Module, Any], Any]) -> None:
        self._name, self._read = name, read

    def __get__(self, module: Any, _kind: type) -> Any:
        if module is None:
            return self
        if self._name not in vars(module):
            raise AttributeError(self._name)
        return self._read(module, vars(module)[self._name])

    def __set__(self, module: Any, number: Any) -> None:
        vars(module)[self._name] = number

    def __delete__(self, module: Any) -> None:
        del vars(module)[self._name]


_LIMIT = "time_step_limit"
_ONE_BY_ONE = ContextVar("one_by_one", default=False)  # whether a thread reads without limits


def _limit(_layer: nn.Module, limit: Any) -> Any:
    # A compiler reads no ContextVar, and compiles the forwards that verify drafts alone.
    without = reads_tree() if torch.compiler.is_compiling() else _ONE_BY_ONE.get()
    return (0.0, float("inf")) if without else limit


# Looked for once: a large model has thousands of modules, and a step little time.
_limited: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def time_steps_of_one_token(model: nn.Module) -> Iterator[None]:
    """Within the block, layers of Mamba 2 take the time steps of several tokens as they take those
    of one: without the limits that transformers sets for several tokens alone, which would make
    another text of them than one token at a time. Forwards of other threads are left alone."""
    if model not in _limited:
        for kind in {type(each) for each in model.modules() if _LIMIT in vars(each)}:
            setattr(kind, _LIMIT, OfThread(_LIMIT, _limit))
        _limited.add(model)
    token = _ONE_BY_ONE.set(True)
    try:
        yield
    finally:
        _ONE_BY_ONE.reset(token)
