"""A target's large matrices once more, in the order in which a CPU's kernels read them.

For the few rows of a tree, torch's own product rearranges a matrix at every call: up to a dozen
rows take up to four times as long as one, on some processors two rows twice as long. A matrix that
was rearranged before is multiplied about as fast as it is read. The model keeps its own matrices:
for single rows, for prompts, and for whoever else runs it.

Shapes: D inputs, O outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from medusa_heads.agreement import TOLERANCE, is_half, relative_error
from medusa_heads.machine import (
    Use,
    has_packed_products,
    pack,
    packed_gain,
    packed_product,
)
from medusa_heads.machine.devices import free_memory
from medusa_heads.machine.kernels import operator
from medusa_heads.target.attention import is_recorded, reads_tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALLEST = 1 << 18  # weights of a matrix; of smaller ones the call takes as long as is saved
ROWS = range(2, 33)  # rows for which it may pay; many are bound by arithmetic in any order
_FEW = 4  # rows from which it pays where it does with eight; below, a measurement of two says
_GAIN = 1.25  # with eight rows, or two; with four and with sixteen it is less than with eight
_AT_ONCE = 1 << 20  # weights that are looked at together
_SHARE = 4  # of free memory the packed matrices may take this part

_MEASURED = 2  # kinds of matrices, the heaviest; the others follow the first

_Kind: TypeAlias = tuple[torch.dtype, int, int]  # with outputs and inputs
_known: Any = WeakKeyDictionary()  # by model
UNPACKED = ContextVar("unpacked", default=False)  # whether a thread does without
_placed: WeakValueDictionary[Any, _Packed] = WeakValueDictionary()  # by `_place`


@contextmanager
def unpacked() -> Iterator[None]:
    """Within the block, this thread multiplies by the models' own matrices."""
    token = UNPACKED.set(True)
    try:
        yield
    finally:
        UNPACKED.reset(token)


class _Packed:
    """One layer's matrix, for so many rows. What it was packed from is known by what a product with
    it gives."""

    def __init__(self, layer: nn.Linear, rows: range) -> None:
        self._layer, self._rows = ref(layer), rows  # which has this as its forward
        self._sums_O = torch.empty(0, dtype=torch.float32, device="cpu")
        self._matrix: Tensor | None = None
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
        matrix = pack(weight_OD)
        x_RD = ramp_D.sin().to(weight_OD.dtype).expand(self._rows[0], -1)
        # A kernel that is wrong here is done without.
        error = relative_error(packed_product(x_RD, matrix), linear(x_RD, weight_OD))
        right = error <= TOLERANCE[is_half(weight_OD.dtype)]
        self._matrix = matrix if right else None
        self._dtype, self._sums_O = weight_OD.dtype, sums_O

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., O), as the layer's own forward, which any thread may ask for."""
        layer = self._own()
        if torch.compiler.is_compiling() or is_recorded():
            # No graph knows how a packed matrix lies, nor whether another one was packed since.
            ours = reads_tree() and not torch.is_grad_enabled()
            product: Tensor = (_in_graphs if ours else linear)(x, layer.weight, layer.bias)
            return product
        return self.product(x, layer.weight, layer.bias)

    def product(self, x: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """`linear`, by the packed matrix where there is a right one, and it pays."""
        matrix = self._matrix  # which another thread may exchange meanwhile
        if (
            matrix is None
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or not x.dtype == weight_OD.dtype == self._dtype
            or x.numel() // x.shape[-1] not in self._rows
        ):
            return linear(x, weight_OD, bias_O)
        return packed_product(x, matrix, None if bias_O is None else bias_O.contiguous())

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


class PackedMatrices:
    """The large matrices of a model's linear layers on the CPU, packed when they are first asked
    for; none where that does not pay on this machine, or takes more than a quarter of the memory
    that is free.

    Args:
        measured: pack where this machine is faster so, with the threads that torch uses; else
            wherever there are kernels for it, whatever the clock says.
    """

    def __init__(self, model: PreTrainedModel, *, measured: bool = True) -> None:
        self._model, self._measured = ref(model), measured
        self._packed: WeakKeyDictionary[nn.Linear, _Packed] = WeakKeyDictionary()
        self._rows: dict[_Kind, range] = {}  # for as long as the model is decoded
        self._looked = False
        self._lock = Lock()  # any thread may decode the model
        self._inside, self._replaced = 0, dict[nn.Linear, _Packed]()

    @staticmethod
    def of(model: PreTrainedModel) -> PackedMatrices:
        """One for all who decode a model."""
        packed: PackedMatrices | None = _known.get(model)
        if packed is None:
            packed = _known[model] = PackedMatrices(model)
        return packed

    def look_again(self) -> None:
        """Layers and weights may have changed: look at them before they are used next."""
        self._looked = False

    @property
    def pays(self) -> bool:
        """Whether there are any, which may have to be measured first."""
        return bool(self._chosen())

    @property
    def held_bytes(self) -> int:
        """What they take besides the model's own."""
        return sum(layer.weight.nbytes for layer in self._packed)

    def look(self, rows: int) -> None:
        """See that what so many rows are multiplied by is packed from the weights of this text."""
        if rows in ROWS and not self._looked:
            with self.instead(rows):
                pass

    @contextmanager
    def instead(self, rows: int) -> Iterator[None]:
        """Within the block, the layers of this model multiply so many rows by packed matrices."""
        if rows not in ROWS or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            yield
            return
        with self._lock:
            if not self._looked:
                self._look()
            self._inside += 1
            if self._inside == 1:
                self._replaced = dict(self._packed)
                for layer, packed in self._replaced.items():
                    layer.__dict__["forward"] = packed.forward  # nn.Module's own way takes longer
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:  # else a graph that another thread makes would be no more
                    for layer in self._replaced:
                        layer.__dict__.pop("forward", None)
                    self._replaced = {}

    def _look(self) -> None:
        layers = {
            layer: self._packed.get(layer) or _Packed(layer, rows)
            for layer, rows in self._chosen().items()
        }
        self._packed = WeakKeyDictionary(layers)
        for packed in layers.values():
            packed.look()
        self._looked = True

    def _chosen(self) -> dict[nn.Linear, range]:
        """The layers to pack, or that are packed, and for which rows."""
        model = self._model()
        alike: dict[_Kind, list[nn.Linear]] = defaultdict(list)
        for module in () if model is None else model.modules():
            if _is_large(module):
                outputs, inputs = module.weight.shape
                alike[module.weight.dtype, outputs, inputs].append(module)
        layers: dict[nn.Linear, range] = {}
        heaviest = sorted(alike, key=lambda kind: -sum(each.weight.nbytes for each in alike[kind]))
        for number, kind in enumerate(heaviest):
            alone = number < _MEASURED or kind[0] is not heaviest[0][0]
            if rows := self._rows_of(kind if alone else heaviest[0]):
                layers |= dict.fromkeys(alike[kind], rows)
        new = sum(layer.weight.nbytes for layer in layers if layer not in self._packed)
        free = free_memory(torch.device("cpu")) if new else None
        return layers if free is None or new <= free // _SHARE else {}

    def _rows_of(self, kind: _Kind) -> range:
        if kind not in self._rows:
            rows = range(0)
            if self._gain(kind, "few") >= _GAIN:
                least = ROWS.start if self._gain(kind, "two") >= _GAIN else _FEW
                rows = range(least, ROWS.stop)
            self._rows[kind] = rows
        return self._rows[kind]

    def _gain(self, kind: _Kind, use: Use) -> float:
        return packed_gain(*kind, use) if self._measured else _GAIN * has_packed_products(kind[0])


def _is_large(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a plain linear layer on the CPU, and large enough."""
    if type(module) is not nn.Linear or not _is_own(vars(module).get("forward")):
        return False
    weight: Any = module.weight
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor
    plain = plain and weight.layout is torch.strided
    return plain and weight.device.type == "cpu" and weight.numel() >= SMALLEST


def _same_bits(sums_O: Tensor, others_O: Tensor) -> bool:
    """Also where they are no numbers."""
    return torch.equal(sums_O.view(torch.int32), others_O.view(torch.int32))


def _is_own(forward: Callable[..., Any] | None) -> bool:
    """Whether a layer's forward is its class's, or put there for another text, in its place for as
    long as a step takes; accelerate's, such as, is neither."""
    return forward is None or isinstance(getattr(forward, "__self__", None), _Packed)
