"""Other ways to torch's kernels than the usual ones: products in eight bits, for drafts; products
by oneDNN's, of a matrix that was rearranged once, where the usual one rearranges it for every call;
and attention that reads no more of a cache than is in use.

Shapes: N rows of D inputs each, O outputs; of attention B batch, H query heads, G heads of keys, N
queries, S slots, X and Y widths of keys and values.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_KNOWN = ("x86_64", "AMD64")
_MOST_INPUT = 127  # of a row in eight bits
_PACKED_FOR = 16  # rows that the order of a packed matrix suits; of other numbers it is as right
_PACKABLE = (torch.float32, torch.bfloat16)
_SLOTS = 64  # of a cache that attention reads or leaves out together
_operators = torch.library.Library("medusa_heads", "FRAGMENT")


def int8_product(x_ND: Tensor, int8_OD: Tensor) -> Tensor:
    """Near x_ND @ int8_OD.T: inputs in float32, each row rounded to 255 steps; [N, O], float32."""
    unit_N1 = x_ND.abs().amax(dim=1, keepdim=True).div_(_MOST_INPUT).clamp_min_(1e-30)
    int8_ND = (x_ND / unit_N1).round_().to(torch.int8)
    return torch._int_mm(int8_ND, int8_OD.T).float().mul_(unit_N1)


def has_int8_products() -> bool:
    """Whether torch multiplies eight bits here by more than a loop."""
    return platform.machine() in _KNOWN and torch.backends.mkldnn.is_available()


def pack(weight_OD: Tensor) -> Tensor:
    """A copy in an order of its own, which only `packed_product` reads."""
    kernels: Any = torch.ops.mkldnn
    packed: Tensor = kernels._reorder_linear_weight(weight_OD.detach(), _PACKED_FOR)
    return packed


def packed_product(x: Tensor, packed: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`linear(x, weight_OD, bias_O)`, (..., D) -> (..., O), rounded as other kernels round."""
    kernels: Any = torch.ops.mkldnn
    product: Tensor = kernels._linear_pointwise(x, packed, bias_O, "none", [], "")
    return product


def has_packed_products(dtype: torch.dtype) -> bool:
    """Whether this build of torch multiplies packed matrices of a dtype on this CPU."""
    there = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if dtype not in _PACKABLE or not there or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        square = torch.ones(16, 16, dtype=dtype, device="cpu")
        packed_product(square, pack(square))
    except RuntimeError:  # oneDNN has no bf16 on some processors
        return False
    return True


def grouped_attention(
    query_BHNX: Tensor,
    key_BGSX: Tensor,
    value_BGSY: Tensor,
    mask: Tensor | None,
    scale: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of N tokens, where the queries of heads that share keys are further tokens of one
    head: keys are read once. The mask is that of these tokens; [B, N, H, Y], contiguous."""
    batch, heads, tokens, width = query_BHNX.shape
    shared = key_BGSX.shape[1]
    attended_BGMY = torch.nn.functional.scaled_dot_product_attention(
        query_BHNX.reshape(batch, shared, -1, width),
        key_BGSX,
        value_BGSY,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scale,
    )
    by_group = attended_BGMY.view(batch, shared, heads // shared, tokens, value_BGSY.shape[-1])
    return by_group.permute(0, 3, 1, 2, 4).reshape(batch, tokens, heads, -1).contiguous()


def attention_in_use(
    query_BHNX: Tensor, key_BGSX: Tensor, value_BGSY: Tensor, mask_B1NS: Tensor, scale: float | None
) -> Tensor:
    """The same over a cache of S slots, of which only the first so many are read that any token
    sees. The mask is one of numbers, and the last token sees the last slot that is in use: its own.
    """
    heads, tokens = query_BHNX.shape[1:3]
    shared, slots = key_BGSX.shape[1:3]
    seen_S = (mask_B1NS[:, 0, -1] > torch.finfo(mask_B1NS.dtype).min).any(dim=0)
    places = seen_S.nonzero()
    last = int(places[-1]) if len(places) else slots
    used = min((last // _SLOTS + 1) * _SLOTS, slots)
    mask_B1NU = mask_B1NS[..., :used]
    if heads > shared and tokens > 1:
        mask_B1NU = mask_B1NU.repeat(1, 1, heads // shared, 1)
    return grouped_attention(
        query_BHNX, key_BGSX[:, :, :used], value_BGSY[:, :, :used], mask_B1NU, scale
    )


def operator(schema: str, on_cpu: Callable[..., Tensor], like: Callable[..., Tensor]) -> Any:
    """An operator `medusa_heads::NAME` of torch, by which graphs call what no compiler looks into:
    what is told at run time alone.

    Args:
        schema: as torch writes it, such as `name(Tensor x) -> Tensor`.
        on_cpu: what it does.
        like: gives an empty result of the same shape.
    """
    name = schema.partition("(")[0]
    # A second copy of this package in one process calls what the first one made.
    if not hasattr(torch.ops.medusa_heads, name):
        _operators.define(schema)
        _operators.impl(name, on_cpu, "CPU")
        _operators.impl(name, like, "Meta")
    return getattr(torch.ops.medusa_heads, name)
