"""Attention of a tree's tokens over a cache of fixed size, on a GPU: a kernel in Triton.

torch's own kernels read all slots of such a cache, with a mask as large as the tokens times the
slots, and give each head a processor: at batch 1 most of a GPU waits. Here keys and values are read
once for all query heads that share them, from the first slot that any token sees to the last one;
what a token sees is a bit in the word of each slot; and the slots are spread over parts, as many as
keep the processors busy, whose results a second kernel adds up. What exceeds a block of rows is
of several, each of which reads them.

Shapes: B batch, H query heads, G heads of keys, N tokens, S slots, X and Y widths of keys and
values; P parts, M = H / G * N tokens of all query heads that read the same keys.
Sources: Milakov and Gimelshein 2018, arXiv:1805.02867 (the running softmax); Dao et al. 2023,
"Flash-Decoding for long-context inference" (the parts).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_heads.machine.kernels import FUSED

_FEWEST = 16  # rows and columns of a product on tensor cores
_MOST_PARTS = 64
_WAVES = 2  # programs for each processor
_MASK_AT_ONCE = 8192  # numbers of a mask
_STAGES = 3  # slots of the next block are read while those of one are multiplied


def split_attention(
    query_BHNX: Tensor, key_BGSX: Tensor, value_BGSY: Tensor, seen_BU: Tensor, scale: float | None
) -> Tensor:
    """The attention of N tokens, at most 64, [B, N, H, Y].

    Args:
        seen_BU: U = S + 2 words of 64 bits; token n sees slot s where bit n of its word is set. Of
            a token that sees nothing the result is 0. The last two are the first slot that any
            token sees, and the one behind the last.
        scale: of the products of queries and keys; by default 1 / sqrt(X).
    """
    batch, heads, tokens, width = query_BHNX.shape
    shared, slots = key_BGSX.shape[1:3]
    group, wide = heads // shared, value_BGSY.shape[-1]
    rows = group * tokens
    block_x, block_y = (max(triton.next_power_of_2(size), _FEWEST) for size in (width, wide))
    most_rows, block_s = _blocks(max(block_x, block_y), query_BHNX.element_size())
    block_m = min(max(triton.next_power_of_2(rows), _FEWEST), most_rows)
    blocks = triton.cdiv(rows, block_m)
    # What the parts say is written and read again: that takes no longer than to read the cache.
    cached = slots * (width + wide) * key_BGSX.element_size()
    most = min(triton.cdiv(slots, block_s), cached // (4 * rows * wide), _MOST_PARTS)
    parts = _parts(query_BHNX.device, batch * shared * blocks, most)
    options: Any = {"dtype": torch.float32, "device": query_BHNX.device}
    added_TPMY = torch.empty(batch * shared, parts, rows, wide, **options)
    peak_TPM, total_TPM = torch.empty(2, batch * shared, parts, rows, **options)
    out_BNHY = query_BHNX.new_empty(batch, tokens, heads, wide)
    query, key, value = (
        each if each.stride(-1) == 1 else each.contiguous()
        for each in (query_BHNX, key_BGSX, value_BGSY)
    )
    _attend[(blocks, parts, batch * shared)](
        query,
        key,
        value,
        seen_BU,
        added_TPMY,
        peak_TPM,
        total_TPM,
        (width**-0.5 if scale is None else scale) / math.log(2.0),
        tokens,
        slots,
        *_steps(query),
        *_steps(key),
        *_steps(value),
        *_steps(seen_BU),
        SHARED=shared,
        ROWS=rows,
        X=width,
        Y=wide,
        PARTS=parts,
        BLOCK_M=block_m,
        BLOCK_S=block_s,
        BLOCK_X=block_x,
        BLOCK_Y=block_y,
        num_warps=8 if block_m > 64 else 4,
        num_stages=_STAGES,
        **FUSED,
    )
    _add_up[(rows, batch * shared)](
        added_TPMY,
        peak_TPM,
        total_TPM,
        out_BNHY,
        tokens,
        SHARED=shared,
        ROWS=rows,
        Y=wide,
        PARTS=parts,
        BLOCK_P=triton.next_power_of_2(parts),
        BLOCK_Y=block_y,
        num_warps=4,
        **FUSED,
    )
    return out_BNHY


def words_seen(mask_B1NS: Tensor) -> Tensor:
    """What `split_attention` is told of a mask of numbers, see `attention.seen_words`."""
    mask_BNS = mask_B1NS[:, 0] if mask_B1NS.stride(-1) == 1 else mask_B1NS[:, 0].contiguous()
    batch, tokens, slots = mask_BNS.shape
    words_BU = mask_BNS.new_empty(batch, slots + 2, dtype=torch.long)
    least, block = torch.finfo(mask_BNS.dtype).min / 2, triton.next_power_of_2(tokens)
    given = mask_BNS, words_BU, least, tokens, slots, *_steps(mask_BNS)
    _words_seen[(batch,)](*given, block, _MASK_AT_ONCE // block, num_warps=8, **FUSED)
    return words_BU


def _steps(x: Tensor) -> list[int]:
    """Of all dimensions but the last, which has none. Where there is one place alone, a compiler
    may give another step than was there before, and Triton make another kernel for it: that cannot
    be loaded while a graph is recorded."""
    steps = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return [step if size > 1 else 0 for size, step in steps]


def _blocks(width: int, size: int) -> tuple[int, int]:
    """Rows at most, and slots, of a block of so wide heads, of numbers of so many bytes. Of more,
    registers run over, or what a processor of smaller GPUs holds. float32 is multiplied in full,
    without tensor cores."""
    if size > 2:
        return (32, 32) if width <= 64 else (16, 16)
    return (128, 64) if width <= 64 else (128, 32) if width <= 128 else (32, 32)


def _parts(device: torch.device, others: int, most: int) -> int:
    """Over how many programs the slots are spread, where so many others run beside them."""
    processors = 2  # as many parts as make them differ, where a CPU interprets this
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(min(triton.cdiv(_WAVES * processors, others), most), 1)


@triton.jit
def _words_seen(  # type: ignore[no-untyped-def]
    mask, words, least, N, S, mask_b, mask_n, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    n_N, words_of_b = tl.arange(0, BLOCK_N).to(tl.int64), words + b * (S + 2)
    bit_N = tl.full([BLOCK_N], 1, tl.int64) << n_N
    first_S = tl.full([BLOCK_S], S, tl.int32)
    behind_S = tl.zeros([BLOCK_S], tl.int32)
    for start in range(0, S, BLOCK_S):
        s_S = start + tl.arange(0, BLOCK_S)
        there_NS = (n_N < N)[:, None] & (s_S < S)[None, :]
        at_NS = b * mask_b + n_N[:, None] * mask_n + s_S[None, :]
        mask_NS = tl.load(mask + at_NS, mask=there_NS, other=float("-inf"))
        allowed_NS = mask_NS.to(tl.float32) > least  # Triton 3.9 interprets bf16 as whole numbers
        word_S = tl.sum(tl.where(allowed_NS, bit_N[:, None], 0), 0)
        tl.store(words_of_b + s_S, word_S, mask=s_S < S)
        first_S = tl.minimum(first_S, tl.where(word_S != 0, s_S, S))
        behind_S = tl.maximum(behind_S, tl.where(word_S != 0, s_S + 1, 0))
    behind = tl.max(behind_S, 0)
    tl.store(words_of_b + S, tl.where(behind > 0, tl.min(first_S, 0), 0).to(tl.int64))
    tl.store(words_of_b + S + 1, behind.to(tl.int64))


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    seen,
    added,
    peak,
    total,
    scale,
    tokens,
    slots,
    query_b,
    query_h,
    query_n,
    key_b,
    key_g,
    key_s,
    value_b,
    value_g,
    value_s,
    seen_b,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
):
    """One part of the slots for some rows of one head of keys: what it adds to the result, not
    divided by the `total` of its weights, which are relative to 2 ** `peak`."""
    part, text = tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, g = text // SHARED, text % SHARED
    rows_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there_M = rows_M < ROWS
    node_M = (rows_M % tokens).to(tl.int64)
    head_M = g * (ROWS // tokens) + rows_M // tokens
    x_X, y_Y = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_Y)
    query_M = query + b * query_b + head_M * query_h + node_M * query_n
    q_MX = tl.load(
        query_M[:, None] + x_X[None, :], mask=there_M[:, None] & (x_X < X)[None, :], other=0.0
    )
    key_X = key + b * key_b + g * key_g + x_X
    value_Y = value + b * value_b + g * value_g + y_Y
    begin = tl.load(seen + b * seen_b + slots).to(tl.int32)
    end = tl.load(seen + b * seen_b + slots + 1).to(tl.int32)
    first = (begin // BLOCK_S + part) * BLOCK_S
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    added_MY = tl.zeros([BLOCK_M, BLOCK_Y], tl.float32)
    for start in range(first, end, PARTS * BLOCK_S):
        slots_S = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
        there_S = slots_S < slots
        word_S = tl.load(seen + b * seen_b + slots_S, mask=there_S, other=0)
        k_XS = tl.load(
            key_X[:, None] + (slots_S * key_s)[None, :],
            mask=(x_X < X)[:, None] & there_S[None, :],
            other=0.0,
        )
        scores_MS = tl.dot(q_MX, k_XS, input_precision="ieee") * scale
        seen_MS = ((word_S[None, :] >> node_M[:, None]) & 1) != 0
        scores_MS = tl.where(seen_MS, scores_MS, float("-inf"))
        highest_M = tl.maximum(peak_M, tl.max(scores_MS, 1))
        above_M = tl.where(highest_M == float("-inf"), 0.0, highest_M)  # nothing seen as yet
        weight_MS = tl.exp2(scores_MS - above_M[:, None])
        faded_M = tl.exp2(peak_M - above_M)
        v_SY = tl.load(
            value_Y[None, :] + (slots_S * value_s)[:, None],
            mask=there_S[:, None] & (y_Y < Y)[None, :],
            other=0.0,
        )
        added_MY = added_MY * faded_M[:, None] + tl.dot(
            weight_MS.to(v_SY.dtype), v_SY, input_precision="ieee"
        )
        total_M = total_M * faded_M + tl.sum(weight_MS, 1)
        peak_M = highest_M
    row_M = (text * PARTS + part) * ROWS + rows_M
    tl.store(peak + row_M, peak_M, mask=there_M)
    tl.store(total + row_M, total_M, mask=there_M)
    if first < end:  # no part of the mask, which Triton 3.9 interprets only if it is one of blocks
        tl.store(
            added + row_M[:, None] * Y + y_Y[None, :],
            added_MY,
            mask=there_M[:, None] & (y_Y < Y)[None, :],
        )


@triton.jit
def _add_up(  # type: ignore[no-untyped-def]
    added,
    peak,
    total,
    out,
    tokens,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    Y: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Y: tl.constexpr,
):
    """The parts of one row, each in its share of the softmax over all of them."""
    row, text = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_P, y_Y = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_Y)
    there_P = p_P < PARTS
    place_P = (text * PARTS + p_P) * ROWS + row
    peak_P = tl.load(peak + place_P, mask=there_P, other=float("-inf"))
    total_P = tl.load(total + place_P, mask=there_P, other=0.0)
    highest = tl.max(peak_P, 0)
    share_P = tl.exp2(peak_P - tl.where(highest == float("-inf"), 0.0, highest))
    added_PY = tl.load(
        added + place_P[:, None] * Y + y_Y[None, :],
        mask=(total_P > 0.0)[:, None] & (y_Y < Y)[None, :],
        other=0.0,
    )
    whole = tl.sum(share_P * total_P, 0)
    result_Y = tl.sum(share_P[:, None] * added_PY, 0) / tl.where(whole == 0.0, 1.0, whole)
    heads = SHARED * (ROWS // tokens)
    b, head = text // SHARED, (text % SHARED) * (ROWS // tokens) + row // tokens
    at = ((b * tokens + row % tokens) * heads + head) * Y
    tl.store(out + at + y_Y, result_Y.to(out.dtype.element_ty), mask=y_Y < Y)
