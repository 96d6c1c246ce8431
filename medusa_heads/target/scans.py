"""Layers of Mamba 1 go on from the state they are in, however many tokens they read.

Transformers reads one token from the state, but begins every scan over several of them anew. Within
`scans_go_on` a scan takes its tokens one after the other, each with the function that reads one;
what surrounds the scan, and the weights with it, is still read once for all tokens.

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
