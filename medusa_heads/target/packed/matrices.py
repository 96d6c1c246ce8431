"""A target's large matrices once more, in the order in which a CPU's kernels read them.

For the few rows of a tree, torch's own product rearranges a matrix at every call: up to a dozen
rows take up to four times as long as one, on some processors two rows twice as long; with AMX one
row of bfloat16 takes 1.5 times as long as it must. A matrix that was rearranged before is
multiplied about as fast as it is read. And some processors read a wide matrix up to twice as fast
by its columns, where there is one row. The model keeps its own matrices: for prompts, and for
whoever else runs it.

Shapes: D inputs, O outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from medusa_heads.machine.devices import free_memory
from medusa_heads.machine.kernels import has_packed_products
from medusa_heads.machine.products import Use, packed_gain, turned_gain
from medusa_heads.target.packed.gain import forward_gain
from medusa_heads.target.packed.layer import FEW, Copies, PackedLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALLEST = 1 << 18  # weights of a matrix; of smaller ones the call takes as long as is saved
ROWS = range(1, 33)  # rows for which it may pay; many are bound by arithmetic in any order
_EIGHT = 8  # where two rows alone pay, fewer than these
_GAIN = 1.25  # with eight rows, or two; with four and with sixteen it is less than with eight
_LITTLE = 1.05  # with eight rows, for which nothing is packed, but which takes what is there
_GAIN_OF_ONE = 1.15  # with one row, by columns or packed
_GAIN_OF_FORWARD = 1.05  # of one token; scripts call copies at some cost, and gain a little less
_SHARE = 4  # of free memory the packed matrices may take this part

_TRIED: tuple[Use, ...] = ("decode", "two", "few")
_MEASURED = 2  # kinds of matrices, the heaviest; the others follow the first

_Kind: TypeAlias = tuple[torch.dtype, int, int]  # with outputs and inputs
_known: Any = WeakKeyDictionary()  # by model
UNPACKED = ContextVar("unpacked", default=False)  # whether a thread does without


@contextmanager
def unpacked() -> Iterator[None]:
    """Within the block, this thread multiplies by the models' own matrices."""
    token = UNPACKED.set(True)
    try:
        yield
    finally:
        UNPACKED.reset(token)


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
        self._packed: WeakKeyDictionary[nn.Linear, PackedLayer] = WeakKeyDictionary()
        self._copies: dict[_Kind, Copies] = {}  # for as long as the model is decoded
        self._pay_for_one: dict[Any, bool] = {}  # those of which kinds
        self._served: frozenset[int] | None = None
        self._looked = False
        self._lock = RLock()  # any thread may decode the model
        self._inside, self._replaced = 0, dict[nn.Linear, PackedLayer]()

    @staticmethod
    def of(model: PreTrainedModel) -> PackedMatrices:
        """One for all who decode a model."""
        packed: PackedMatrices | None = _known.get(model)
        if packed is None:
            packed = _known[model] = PackedMatrices(model)
        return packed

    def look_again(self) -> None:
        """Layers and weights may have changed: look at them before they are used next."""
        self._looked, self._served = False, None

    @property
    def rows(self) -> frozenset[int]:
        """Of which numbers any are, which may have to be measured first."""
        return frozenset[int]().union(*(each.rows for each in self._chosen().values()))

    @property
    def held_bytes(self) -> int:
        """What they take besides the model's own."""
        return sum(each.copies.count * layer.weight.nbytes for layer, each in self._packed.items())

    def serve(self, rows: int) -> bool:
        """Whether so many rows are multiplied by any, in this text."""
        if rows not in ROWS:
            return False
        with self._lock:
            if self._served is None:
                self._served = self.rows
            return rows in self._served

    def look(self, rows: int) -> None:
        """See that what so many rows are multiplied by is packed from the weights of this text."""
        if rows in ROWS and not self._looked:
            with self.instead(rows):
                pass

    @contextmanager
    def instead(self, rows: int) -> Iterator[None]:
        """Within the block, the layers of this model multiply so many rows by packed matrices."""
        own = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        if own or not self.serve(rows):
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
        layers = {}
        for layer, copies in self._chosen().items():
            packed = self._packed.get(layer)
            if packed is None or packed.copies != copies:  # as of another dtype, with other kernels
                packed = PackedLayer(layer, copies)
            layers[layer] = packed
        self._packed = WeakKeyDictionary(layers)
        for packed in layers.values():
            packed.look()
        self._looked = True

    def _chosen(self) -> dict[nn.Linear, Copies]:
        """The layers to copy, or that are copied, and how."""
        model = self._model()
        alike: dict[_Kind, list[nn.Linear]] = defaultdict(list)
        for module in () if model is None else model.modules():
            if _is_large(module):
                outputs, inputs = module.weight.shape
                alike[module.weight.dtype, outputs, inputs].append(module)
        layers: dict[nn.Linear, Copies] = {}
        heaviest = sorted(alike, key=lambda kind: -sum(each.weight.nbytes for each in alike[kind]))
        for number, kind in enumerate(heaviest):
            alone = number < _MEASURED or kind[0] is not heaviest[0][0]
            copies = self._copies_of(kind if alone else heaviest[0])
            if not alone and _width(kind) < _width(heaviest[0]):
                copies = replace(copies, turned=False)
            if copies.rows:
                layers |= dict.fromkeys(alike[kind], copies)
        new = sum(
            copies.count * layer.weight.nbytes
            for layer, copies in layers.items()
            if layer not in self._packed
        )
        free = free_memory(torch.device("cpu")) if new else None
        if free is not None and new > free // _SHARE:
            return {}
        if not self._measured or self._for_one_pay(layers):
            return layers
        fewer = {
            layer: replace(copies, packed=copies.packed - {1}, turned=False)
            for layer, copies in layers.items()
        }
        return {layer: copies for layer, copies in fewer.items() if copies.rows}

    def _for_one_pay(self, layers: Mapping[nn.Linear, Copies]) -> bool:
        """Whether these copies make a forward of one token faster, as far as that is known."""
        ones = {layer: copies for layer, copies in layers.items() if 1 in copies.rows}
        kinds = frozenset((layer.weight.dtype, layer.weight.shape) for layer in ones)
        model = self._model()
        if not ones or model is None:
            return True
        with self._lock:
            if kinds not in self._pay_for_one:
                if self._inside:  # another thread multiplies by them now
                    return True
                gain = forward_gain(model, ones)
                self._pay_for_one[kinds] = gain is None or gain >= _GAIN_OF_FORWARD
            return self._pay_for_one[kinds]

    def _copies_of(self, kind: _Kind) -> Copies:
        if kind not in self._copies:
            one, two, few = (self._gain(kind, use) for use in _TRIED)
            packed = set[int]()
            if max(two, few) >= _GAIN:
                least = 2 if two >= _GAIN else FEW
                packed |= set(range(least, ROWS.stop if few >= _LITTLE else _EIGHT))
            # No processor is known that reads others faster by their columns.
            turned = 1.0
            if _width(kind) > 1:
                turned = turned_gain(*kind) if self._measured else _GAIN_OF_ONE
            if self._measured and packed and one >= _GAIN_OF_ONE and one > turned:
                packed.add(1)
            by_columns = 1 not in packed and turned >= _GAIN_OF_ONE
            self._copies[kind] = Copies(frozenset(packed), turned=by_columns)
        return self._copies[kind]

    def _gain(self, kind: _Kind, use: Use) -> float:
        return packed_gain(*kind, use) if self._measured else _GAIN * has_packed_products(kind[0])


def _width(kind: _Kind) -> float:
    return kind[1] / kind[2]


def _is_large(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a plain linear layer on the CPU, and large enough."""
    if type(module) is not nn.Linear or not _is_own(vars(module).get("forward")):
        return False
    weight: Any = module.weight
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor
    plain = plain and weight.layout is torch.strided
    return plain and weight.device.type == "cpu" and weight.numel() >= SMALLEST


def _is_own(forward: Callable[..., Any] | None) -> bool:
    """Whether a layer's forward is its class's, or put there for another text, in its place for as
    long as a step takes; accelerate's, such as, is neither."""
    return forward is None or isinstance(getattr(forward, "__self__", None), PackedLayer)
