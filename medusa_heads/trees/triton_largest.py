"""The largest few of many columns on a GPU: a kernel in Triton that looks for them one by one, in
blocks of columns side by side, and another that does the same of what these found. torch sorts, or
counts digits, in a dozen kernels.

Shapes: R rows, V columns, K that are looked for, P of all blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_heads.machine.kernels import FUSED

_COLUMNS = 2048  # that a program looks through


def largest(x_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """torch.topk of the last dimension, what is no number first; of what is equal the first."""
    rows, columns = x_RV.shape
    x_RV = x_RV.contiguous()
    blocks = triton.cdiv(columns, _COLUMNS)
    keys_RP = x_RV.new_empty(rows, blocks * count, dtype=torch.float)
    places_RP = keys_RP.new_empty(rows, blocks * count, dtype=torch.int32)
    values_RK, ids_RK = x_RV.new_empty(rows, count), keys_RP.new_empty(rows, count).long()
    _largest_of_block[(rows, blocks)](
        x_RV, keys_RP, places_RP, columns, blocks, COUNT=count, BLOCK=_COLUMNS, num_warps=4, **FUSED
    )
    _largest_of_all[(rows,)](
        x_RV,
        keys_RP,
        places_RP,
        values_RK,
        ids_RK,
        columns,
        blocks * count,
        COUNT=count,
        BLOCK=triton.next_power_of_2(blocks * count),
        num_warps=4,
        **FUSED,
    )
    return values_RK, ids_RK


@triton.jit
def _pick(key_P, place_P, taken):  # type: ignore[no-untyped-def]
    """The largest key and where it stands, the first of several; and the keys without it."""
    best = tl.max(key_P, 0)
    place = tl.min(tl.where(key_P == best, place_P, taken), 0)
    return best, place, tl.where(place_P == place, float("-inf"), key_P)


@triton.jit
def _largest_of_block(x, keys, places, V, blocks, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place_P = block * BLOCK + tl.arange(0, BLOCK)
    value_P = tl.load(x + row * V + place_P, mask=place_P < V, other=0.0).to(tl.float32)
    # What is no number comes first; and the least that a column can be is more than none at all.
    key_P = tl.where(value_P != value_P, float("inf"), tl.maximum(value_P, -3.0e38))
    key_P = tl.where(place_P < V, key_P, float("-inf"))
    to = (row * blocks + block) * COUNT
    for k in range(0, COUNT):
        best, place, key_P = _pick(key_P, place_P, V)
        tl.store(keys + to + k, best)
        tl.store(places + to + k, place)


@triton.jit
def _largest_of_all(  # type: ignore[no-untyped-def]
    x, keys, places, values, ids, V, P, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at_P = tl.arange(0, BLOCK)
    key_P = tl.load(keys + row * P + at_P, mask=at_P < P, other=float("-inf"))
    place_P = tl.load(places + row * P + at_P, mask=at_P < P, other=V)
    for k in range(0, COUNT):
        _, place, key_P = _pick(key_P, place_P, V)
        tl.store(values + row * COUNT + k, tl.load(x + row * V + place))
        tl.store(ids + row * COUNT + k, place.to(tl.int64))
