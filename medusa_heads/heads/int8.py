"""Heads as drafters read them on a CPU: large matrices in eight bits.

There drafting is bound by reading the heads' matrices, the vocabulary's before all. In eight bits
they are a quarter of what they are in float32, and most processors multiply these faster. Drafts
need no more: what is committed is the target's own choice.

Shapes: R rows (any leading dimensions), N all of them, D inputs, O outputs.
Source: products of integers, with a scale for each row of weights and for each input (Jacob et al.
2018, arXiv:1712.05877; Dettmers et al. 2022, arXiv:2208.07339, section 2).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from medusa_heads.heads.correction import Correction
from medusa_heads.machine import GAIN, has_int8_products, int8_gain, int8_product

if TYPE_CHECKING:
    from medusa_heads.heads.base import AnyHeads, DraftHeads

SMALLEST = 1 << 18  # weights of a matrix; of smaller ones the call takes longer than the product
# Where a processor has no instructions for such products, two of them are added in 16 bits, which
# these weights never fill. Elsewhere another bit would bring nothing that a draft could tell.
_MOST_WEIGHT = 63
_AT_ONCE = 1 << 22  # weights that are rounded at a time
# A layer that also hands its input on has a diagonal beside which all other weights would be
# rounded away.
_OUTSTANDING = 8.0  # times as large as the others

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Rounded(NamedTuple):
    """Weights in eight bits.

    Attributes:
        int8_OD: the weights, those that hand inputs on left out.
        unit_O: what a unit of each row is.
        handed_on_O: the weight of each output's own input; None where these are as all others.
    """

    int8_OD: Tensor
    unit_O: Tensor
    handed_on_O: Tensor | None


_rounded: Any = WeakIdKeyDictionary()  # by weights: sums of their rows, and what was made of them


class Int8Linear(nn.Linear):
    """A linear layer whose product is near, not exact. Weight and bias stay what they were, for all
    who read them; what is made of them here does not follow when they are trained on."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight_OD.shape
        self.weight, self.bias = weight_OD, bias_O  # type: ignore[assignment]
        self._rounded: Rounded | None = None  # when it is first asked for

    @property
    def held(self) -> int:
        """Bytes besides the weights."""
        if self._rounded is None:
            self._rounded = _round(self.weight)
        return sum(part.nbytes for part in self._rounded if part is not None)

    def forward(self, x_RD: Tensor) -> Tensor:
        """(..., D) -> (..., O), in the input's dtype."""
        return self.rows(x_RD).to(x_RD.dtype)

    def rows(self, x_RD: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """All of the outputs, or those from `start` to `stop`, in float32."""
        if self._rounded is None:
            self._rounded = _round(self.weight)
        int8_OD, unit_O, handed_on_O = self._rounded
        x_ND = x_RD.flatten(0, -2).float()
        out_NO = int8_product(x_ND, int8_OD[start:stop]).mul_(unit_O[start:stop])
        if handed_on_O is not None:
            out_NO.addcmul_(x_ND[:, : self.out_features][:, start:stop], handed_on_O[start:stop])
        if self.bias is not None:
            out_NO.add_(self.bias[start:stop])
        return out_NO.unflatten(0, x_RD.shape[:-1])


def in_int8(heads: AnyHeads, *, measured: bool = True) -> AnyHeads:
    """These heads, for drafting: a view of them whose large matrices, the target's vocabulary among
    them, are multiplied in eight bits, or they themselves where that does not pay. The view shares
    every weight. It does not see what is trained on or shared later.

    Args:
        measured: take eight bits where this machine is faster so, with the threads that torch uses
            now; else wherever there are products of them, whatever the clock says.
    """
    pays = partial(_pays, measured=measured)
    view = _view(heads, pays)
    if heads.config.vocab_matrix == "shared":
        weight_VD, bias_V = heads.vocab_matrix(0)
        if pays(weight_VD):
            view = copy.copy(view)
            view.near_vocabulary = (Int8Linear(weight_VD, bias_V),)
    return view


def int8_layers(heads: DraftHeads) -> list[Int8Linear]:
    """What a view multiplies in eight bits."""
    layers = [module for module in heads.modules() if isinstance(module, Int8Linear)]
    return [*layers, *heads.near_vocabulary]


def _view(module: AnyModule, pays: Callable[[Tensor], bool]) -> AnyModule:
    """The module with other layers where these pay; else itself. A correction reads rows."""
    linear: Any = module
    if type(module) is nn.Linear and pays(linear.weight):
        layer: Any = Int8Linear(linear.weight, linear.bias)
        return layer
    if isinstance(module, Correction):
        return module
    children = {
        name: None if child is None else _view(child, pays)
        for name, child in module._modules.items()
    }
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    view = copy.copy(module)
    view._modules = children
    return view


def _pays(weight_OD: Any, *, measured: bool) -> bool:
    plain = weight_OD.device.type == "cpu" and type(weight_OD.data) is Tensor
    if not plain or weight_OD.numel() < SMALLEST or not weight_OD.dtype.is_floating_point:
        return False
    return int8_gain(weight_OD.dtype) >= GAIN if measured else has_int8_products()


@torch.no_grad()
def _round(weight_OD: Tensor) -> Rounded:
    """The weights in eight bits; made once for as long as they stay what they are."""
    # Fused optimisers, and whoever writes to `.data`, leave no trace in a version.
    sums_O = weight_OD @ torch.linspace(1.0, 2.0, weight_OD.shape[1], dtype=weight_OD.dtype)
    made = _rounded.get(weight_OD)
    if made is None or not torch.equal(made[0], sums_O):
        # A copy: a view would follow the weights, and keep them.
        own_O = weight_OD.detach().diagonal().to(torch.float32, copy=True)
        usual = weight_OD.abs().mean(dtype=torch.float32)
        hands_on = len(own_O) == len(weight_OD) and own_O.abs().mean() > _OUTSTANDING * usual
        handed_on_O = own_O if hands_on else None
        rows = max(_AT_ONCE // weight_OD.shape[1], 1)
        int8s, units = [], []
        for start in range(0, len(weight_OD), rows):
            piece = weight_OD[start : start + rows].to(torch.float32, copy=True)
            if handed_on_O is not None:
                piece.diagonal(start).zero_()
            units.append(piece.abs().amax(dim=1).div_(_MOST_WEIGHT).clamp_min_(1e-30))
            int8s.append((piece / units[-1][:, None]).round_().to(torch.int8))
        made = sums_O, Rounded(torch.cat(int8s), torch.cat(units), handed_on_O)
        _rounded[weight_OD] = made
    rounded: Rounded = made[1]
    return rounded
