"""What is done to tensors within a block, watched by who records it; and what it asks of the host,
where tensors lie on another device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import RLock
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A number is read, a shape depends on numbers, or a tensor moves.
Asks = Literal["read", "shape", "copied"]

_aten = torch.ops.aten
_READ = {_aten._local_scalar_dense, _aten.item, _aten.equal, _aten.is_nonzero}
_SHAPE = {
    _aten.nonzero, _aten.masked_select, _aten.bincount,
    _aten._unique2, _aten.unique_dim, _aten.unique_consecutive,
}  # fmt: skip
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

# torch keeps one note for all threads of whether any mode is on, each mode puts back what it found,
# and compilers do nothing while the note says so: two that overlap would leave it for good.
_one_at_a_time = RLock()


class ModeOfOneThread(TorchDispatchMode):
    """A mode that waits until those of other threads are over."""

    def __enter__(self) -> Any:
        _one_at_a_time.acquire()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            _one_at_a_time.release()


class Watched(ModeOfOneThread):
    """What happens within, to memory that was there before. Raises RuntimeError before something is
    done that no GPU records, so that nothing is broken by it.

    Attributes:
        held: that memory, by its address: as long as this is kept, nobody else gets it.
        written: by the addresses of what is written to of it, the kind of its numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Any] = {}
        self.written: dict[int, torch.dtype] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if asks(func, args, kwargs) is not None:
            raise RuntimeError(f"{func} asks the host")
        for leaf in tensors_of((args, kwargs)):
            storage = leaf.untyped_storage()
            if storage.data_ptr() not in self._made:
                self.held[storage.data_ptr()] = storage
        for leaf in written_by(func, args, kwargs):
            if (address := leaf.untyped_storage().data_ptr()) in self.held:
                self.written.setdefault(address, leaf.dtype)
        result = func(*args, **kwargs)
        made = {leaf.untyped_storage().data_ptr() for leaf in tensors_of(result)}
        self._made |= made - self.held.keys()
        return result


class NothingRead(TorchFunctionMode):
    """Refuses what no dispatcher sees before it is done."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in UNSEEN or func in (torch.tensor, torch.as_tensor, torch.from_numpy):
            raise RuntimeError(f"{func.__name__} asks the host")
        return func(*args, **(kwargs or {}))


def tensors_of(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def written_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """What an operation of the dispatcher writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_of(args[place] if place < len(args) else kwargs.get(argument.name))


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
