"""One layer's matrix once more: by its columns, and in the order in which a CPU's kernels read it.

Shapes: R rows of D inputs each, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from medusa_heads.agreement import TOLERANCE, is_half, relative_error
from medusa_heads.machine.kernels import operator, pack, packed_product, turn, turned_product
from medusa_heads.target.attention import is_recorded, reads_tree

FEW = 4  # rows from which it pays where it does with eight; below, a measurement of two says

_AT_ONCE = 1 << 20  # weights that are looked at together
_placed: WeakValueDictionary[Any, PackedLayer] = WeakValueDictionary()  # by `_place`


@dataclass(frozen=True)
class Copies:
    """How many rows a layer multiplies by which copy of its matrix."""

    packed: frozenset[int] = frozenset()
    turned: bool = False  # one row by the columns

    @property
    def rows(self) -> frozenset[int]:
        """That any copy multiplies."""
        return self.packed | {1} if self.turned else self.packed

    @property
    def count(self) -> int:
        """Matrices that a layer has besides its own."""
        return bool(self.packed) + self.turned


class PackedLayer:
    """Copies of one layer's matrix. What they were made from is known by what a product with it
    gives."""

    def __init__(self, layer: nn.Linear, copies: Copies) -> None:
        self._layer, self.copies = ref(layer), copies  # the layer has this as its forward
        self._sums_O = torch.empty(0, dtype=torch.float32, device="cpu")
        self._packed: Tensor | None = None
        self._turned_DO: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._known_by: tuple[Any, ...] = ()

    def look(self) -> None:
        """Pack the weights where they are others than before."""
        # Fused optimisers, and whoever writes to `.data`, leave no trace in a version. In float32,
        # where a product rounds no more than the layer's own: half precision would hide a change.
        weight_OD: Any = self._own().weight.detach()
        if _placed.get(self._known_by) is self:
            del _placed[self._known_by]
        self._known_by = _place(weight_OD)
        _placed[self._known_by] = self
        ramp_D = torch.linspace(1.0, 2.0, weight_OD.shape[1], dtype=torch.float32, device="cpu")
        pieces = weight_OD.split(max(_AT_ONCE // len(ramp_D), 1))
        sums_O = torch.cat([piece.float() @ ramp_D for piece in pieces])
        if self._dtype == weight_OD.dtype and _same_bits(sums_O, self._sums_O):
            return

        def copied(
            copy: Callable[[Tensor], Tensor], product: Callable[..., Tensor], rows: int
        ) -> Tensor | None:
            """None for a kernel that is wrong here."""
            matrix = copy(weight_OD)
            x_RD = ramp_D.sin().to(weight_OD.dtype).expand(rows, -1)
            error = relative_error(product(x_RD, matrix), linear(x_RD, weight_OD))
            return matrix if error <= TOLERANCE[is_half(weight_OD.dtype)] else None

        turned_DO = copied(turn, turned_product, 1) if self.copies.turned else None
        packed = copied(pack, packed_product, FEW) if self.copies.packed else None
        self._dtype, self._sums_O = weight_OD.dtype, sums_O
        self._turned_DO, self._packed = turned_DO, packed

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., O), as the layer's own forward, which any thread may ask for."""
        layer = self._own()
        if torch.compiler.is_compiling() or is_recorded():
            # No graph knows how a packed matrix lies, nor whether another one was packed since.
            ours = reads_tree() and not torch.is_grad_enabled()
            return (_in_graphs if ours else linear)(x, layer.weight, layer.bias)
        return self.product(x, layer.weight, layer.bias)

    def product(self, x: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """`linear`, by the packed matrix where there is a right one, and it pays."""
        rows = x.numel() // x.shape[-1]
        by_columns = rows == 1 and self.copies.turned
        # Another thread may exchange it meanwhile.
        matrix = self._turned_DO if by_columns else self._packed
        if (
            matrix is None
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or not x.dtype == weight_OD.dtype == self._dtype
            or rows not in self.copies.rows
        ):
            return linear(x, weight_OD, bias_O)
        multiply = turned_product if by_columns else packed_product
        return multiply(x, matrix, None if bias_O is None else bias_O.contiguous())

    def is_of(self, weight_OD: Tensor) -> bool:
        """Whether these are the weights of its layer."""
        layer = self._layer()
        return layer is not None and _place(layer.weight) == _place(weight_OD)

    def _own(self) -> nn.Linear:
        layer = self._layer()
        assert layer is not None
        return layer


def _linear(x: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """What a graph calls in a layer's place, which is given the layer's own weights."""
    packed = _placed.get(_place(weight_OD))
    if packed is None or not packed.is_of(weight_OD):
        return linear(x, weight_OD, bias_O)
    return packed.product(x, weight_OD, bias_O)


_in_graphs = operator("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, linear)


def _place(weight_OD: Tensor) -> tuple[Any, ...]:
    """What tells a layer's weights from all others that there are now."""
    return weight_OD.data_ptr(), weight_OD.shape, weight_OD.stride(), weight_OD.dtype


def _same_bits(sums_O: Tensor, others_O: Tensor) -> bool:
    """Also where they are no numbers."""
    return torch.equal(sums_O.view(torch.int32), others_O.view(torch.int32))
