"""Moving rows of a cache on a GPU: a kernel in Triton that moves what moves, and leaves the rest.

Shapes: G stacked buffers, B batch, H key-value heads, C slots, A rows to move, W words of 64 bits
of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_heads.machine.kernels import FUSED

_FEWEST = 16  # rows of a block: each number of them is another kernel, and paths vary
_WORDS_OF_WARP = 32 * 8  # that its threads hold in registers


def move_rows(stack: Tensor, source_BA: Tensor, destination_BA: Tensor) -> None:
    """In every buffer [B, H, C, X] of a stack, which lie in order, copy row b's slots
    `source_BA[b]` to `destination_BA[b]`, all at once. A row is whole words."""
    words = stack.view(torch.int64)
    groups, batch, heads, slots, width = words.shape
    moves = source_BA.shape[1]
    block_A = max(triton.next_power_of_2(moves), _FEWEST)
    block_W = triton.next_power_of_2(width)
    warps = triton.next_power_of_2(max(block_A * block_W // _WORDS_OF_WARP, 1))
    _move_rows[(groups * batch * heads,)](
        words,
        source_BA.contiguous(),
        destination_BA.contiguous(),
        moves,
        batch,
        heads,
        slots,
        W=width,
        BLOCK_A=block_A,
        BLOCK_W=block_W,
        num_warps=min(warps, 8),
        **FUSED,
    )


@triton.jit(do_not_specialize=["A", "B", "H", "C"])
def _move_rows(  # type: ignore[no-untyped-def]
    words,
    sources,
    destinations,
    A,
    B,
    H,
    C,
    W: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    buffer = tl.program_id(0)
    row = buffer // H % B
    a_A, w_W = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_W)
    there_A = a_A < A
    from_A = tl.load(sources + row * A + a_A, mask=there_A, other=0)
    to_A = tl.load(destinations + row * A + a_A, mask=there_A, other=0)
    moves_A = there_A & (from_A != to_A)
    moves_AW = moves_A[:, None] & (w_W < W)[None, :]
    words += buffer.to(tl.int64) * C * W
    moved_AW = tl.load(words + from_A[:, None] * W + w_W[None, :], mask=moves_AW)
    tl.debug_barrier()  # what is read of a slot may be written by others
    tl.store(words + to_A[:, None] * W + w_W[None, :], moved_AW, mask=moves_AW)
