"""What an operation asks of the host, where its tensors lie on another device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

# A number is read, a shape depends on numbers, or a tensor moves.
Asks = Literal["read", "shape", "copied"]

_aten = torch.ops.aten
_READ = {_aten._local_scalar_dense, _aten.item, _aten.equal, _aten.is_nonzero}
_SHAPE = {
    *(_aten.nonzero, _aten.masked_select, _aten.bincount),
    *(_aten._unique2, _aten.unique_dim, _aten.unique_consecutive),
}
_REPEAT = {_aten.repeat_interleave.Tensor, _aten.repeat_interleave.self_Tensor}
_BY_MASK = {_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index}
# Which read the number that they write, from a tensor on their own device.
_FILL = {
    _aten.masked_fill.Tensor: 2,  # the argument
    _aten.masked_fill_.Tensor: 2,
    _aten.index_fill.int_Tensor: 3,
    _aten.index_fill_.int_Tensor: 3,
}
# What reads a tensor's memory directly, which no dispatcher sees.
UNSEEN = {Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__array__}


def asks(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Asks | None:
    """What an operator asks that a dispatcher sees, of these arguments; None for nothing."""
    kind = operator.overloadpacket
    number = _FILL.get(operator)
    if kind in _READ or (number is not None and args[number].device == args[0].device):
        return "read"
    if operator in _REPEAT and kwargs.get("output_size") is None:
        return "shape"
    if kind in _SHAPE or (kind in _BY_MASK and any(map(_is_mask, args[1]))):
        return "shape"
    return "copied" if _is_move(kind, args, kwargs) else None


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _is_move(kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if kind in _BY_MASK:  # by places that lie elsewhere
        return any(index is not None and index.device != args[0].device for index in args[1])
    if kind is _aten._to_copy:
        return kwargs.get("device") not in (None, args[0].device)
    # A tensor of no dimensions is handed to a kernel as a number, wherever it lies.
    return kind is _aten.copy_ and args[1].ndim > 0 and args[0].device != args[1].device
