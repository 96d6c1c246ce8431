"""Linear layers as drafters have them on a CPU: their products are near, not exact.

Shapes: R rows (any leading dimensions), N all of them, D inputs, O outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.weak import WeakIdKeyDictionary

from medusa_heads.agreement import TOLERANCE, is_half, relative_error
from medusa_heads.machine.kernels import pack, packed_product

FEW = range(2, 33)  # rows for which a packed matrix may pay: one row is read as fast in any order

Made = TypeVar("Made")
_made: Any = WeakIdKeyDictionary()  # by weights: sums of their rows, and what was made of them


class NearLinear(nn.Linear):
    """A linear layer whose product is near. Weight and bias stay what they were, for all who read
    them; what is made of them here does not follow when they are trained on."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight_OD.shape
        self.weight, self.bias = weight_OD, bias_O  # type: ignore[assignment]

    @property
    @abstractmethod
    def held(self) -> int:
        """Bytes besides the weights."""

    @abstractmethod
    def rows(self, x_RD: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """All of the outputs, or those from `start` to `stop`."""

    @property
    def is_near(self) -> bool:
        """Whether the weights are on a CPU still: a model may be moved when it drafts already."""
        return self.weight.device.type == "cpu"

    def usual_rows(self, x_RD: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """The same by the weights themselves, in their dtype."""
        x_ND = x_RD.flatten(0, -2).to(self.weight.dtype)
        bias_O = None if self.bias is None else self.bias[start:stop]
        return linear(x_ND, self.weight[start:stop], bias_O).unflatten(0, x_RD.shape[:-1])

    def forward(self, x_RD: Tensor) -> Tensor:
        """(..., D) -> (..., O), in the input's dtype."""
        return self.rows(x_RD).to(x_RD.dtype)


class PackedLinear(NearLinear):
    """A linear layer that multiplies few rows by a packed matrix, rounded as other kernels round;
    one row, many, or some of the outputs by the matrix itself."""

    _matrix: tuple[Tensor, ...] | None = None  # when it is first asked for; none where it is wrong

    @property
    def held(self) -> int:
        """Bytes besides the weights."""
        return sum(matrix.nbytes for matrix in self._packed())

    def rows(self, x_RD: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """See NearLinear; in the weights' dtype."""
        whole = start == 0 and stop in (None, self.out_features)
        # No graph knows how a packed matrix lies.
        count = x_RD.numel() // max(x_RD.shape[-1], 1)
        if whole and count in FEW and not torch.compiler.is_compiling():
            for matrix in self._packed():
                x_ND = x_RD.flatten(0, -2).to(self.weight.dtype)
                return packed_product(x_ND, matrix, self.bias).unflatten(0, x_RD.shape[:-1])
        return self.usual_rows(x_RD, start, stop)

    def _packed(self) -> tuple[Tensor, ...]:
        if not self.is_near:
            return ()
        if self._matrix is None:
            self._matrix = made_of(self.weight, _pack)
        return self._matrix


@torch.no_grad()
def made_of(weight_OD: Tensor, make: Callable[[Tensor], Made]) -> Made:
    """What is made of weights, once for as long as they stay what they are."""
    # Fused optimisers, and whoever writes to `.data`, leave no trace in a version.
    sums_O = weight_OD @ _ramp(weight_OD).to(weight_OD.dtype)
    known = _made.get(weight_OD)
    if known is None or known[0] is not make or not torch.equal(known[1], sums_O):
        known = _made[weight_OD] = make, sums_O, make(weight_OD)
    return known[2]


def _pack(weight_OD: Tensor) -> tuple[Tensor, ...]:
    matrix = pack(weight_OD)
    # A kernel that is wrong here is done without.
    x_RD = _ramp(weight_OD).sin().to(weight_OD.dtype).expand(2, -1)
    error = relative_error(packed_product(x_RD, matrix), linear(x_RD, weight_OD))
    return (matrix,) if error <= TOLERANCE[is_half(weight_OD.dtype)] else ()


def _ramp(weight_OD: Tensor) -> Tensor:
    """From 1 to 2, one number for each input, wherever torch would make it by default."""
    options: Any = {"dtype": torch.float32, "device": weight_OD.device}
    return torch.linspace(1.0, 2.0, weight_OD.shape[1], **options)
