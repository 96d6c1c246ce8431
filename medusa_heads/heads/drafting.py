"""Heads as drafters read them on a CPU: large matrices in another form, where that is faster.

There drafting is bound by the heads' matrices, the vocabulary's before all. In eight bits they are
a quarter of what they are in float32; packed, they are multiplied by few rows about as fast as they
are read. Drafts need no exact products: what is committed is the target's own choice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from medusa_heads.heads.base import AnyHeads, DraftHeads
from medusa_heads.heads.correction import Correction
from medusa_heads.heads.int8 import Int8Linear
from medusa_heads.heads.near import NearLinear, PackedLinear
from medusa_heads.machine.choice import GAIN
from medusa_heads.machine.kernels import has_int8_products, has_packed_products
from medusa_heads.machine.products import int8_gain, packed_gain

SMALLEST = 1 << 18  # weights of a matrix; of smaller ones the call takes longer than the product
_PACKED_GAIN = 1.25  # with four rows
_SIDE = 1024  # of the matrix that is measured in place of all

AnyModule = TypeVar("AnyModule", bound=nn.Module)
_Kind = type[NearLinear]


def for_drafting(heads: AnyHeads, *, measured: bool = True) -> AnyHeads:
    """These heads, for drafting: a view of them with other layers in place of the large ones, and
    of the target's vocabulary, or they themselves where that does not pay. The view shares every
    weight. It does not see what is trained on or shared later.

    Args:
        measured: take what is faster on this machine, with the threads that torch uses now; else
            eight bits wherever there are products of them, whatever the clock says.
    """
    kind_of = partial(_kind_of, measured=measured)
    # Of a text they read one row at a time, which is as fast in any order.
    of_one_row = {heads.prefix}
    if not heads.reads_drafts and not heads.one_module:
        of_one_row.update(heads.heads())
    view = _view(heads, kind_of, of_one_row)
    if heads.config.vocab_matrix == "shared":
        weight_VD, bias_V = heads.vocab_matrix(0)
        if (kind := kind_of(weight_VD)) is not None:
            view = copy.copy(view)
            view.near_vocabulary = (kind(weight_VD, bias_V),)
    return view


def near_layers(heads: DraftHeads) -> list[NearLinear]:
    """The layers that a view has in place of others."""
    layers = [module for module in heads.modules() if isinstance(module, NearLinear)]
    return [*layers, *heads.near_vocabulary]


def _view(
    module: AnyModule, kind_of: Callable[..., _Kind | None], of_one_row: set[nn.Module]
) -> AnyModule:
    """The module with other layers where these pay; else itself. A correction reads rows."""
    linear: Any = module
    if module in of_one_row:
        kind_of = partial(kind_of, packs=False)
    if type(module) is nn.Linear and (kind := kind_of(linear.weight)) is not None:
        layer: Any = kind(linear.weight, linear.bias)
        return layer
    if isinstance(module, Correction):
        return module
    children = {
        name: None if child is None else _view(child, kind_of, of_one_row)
        for name, child in module._modules.items()
    }
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    view = copy.copy(module)
    view._modules = children
    return view


def _kind_of(weight_OD: Any, *, measured: bool, packs: bool = True) -> _Kind | None:
    """The layer to multiply these weights by; None for the one that there is."""
    plain = weight_OD.device.type == "cpu" and type(weight_OD.data) is Tensor
    if not plain or weight_OD.numel() < SMALLEST or not weight_OD.dtype.is_floating_point:
        return None
    dtype = weight_OD.dtype
    if int8_gain(dtype) >= GAIN if measured else has_int8_products():
        return Int8Linear
    if packs and measured:
        packs = packed_gain(dtype, _SIDE, _SIDE, "draft") >= _PACKED_GAIN
    return PackedLinear if packs and has_packed_products(dtype) else None
