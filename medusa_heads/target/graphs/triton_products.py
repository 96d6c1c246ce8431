"""Products of a few tokens with several matrices on a GPU: a kernel in Triton that reads all of
them at once.

Of so few tokens a product takes as long as its matrix is read, and a small matrix, as those of
keys and values are, keeps few processors busy. Side by side they fill the GPU.

Shapes: N tokens of D inputs each, O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from medusa_heads.machine.kernels import FUSED

MOST_TOKENS, MOST_MATRICES = 64, 3
_FEWEST = 16  # rows of a product on tensor cores


class Blocks(NamedTuple):
    """How a product is cut: outputs and inputs of a block, and what hardware a program takes."""

    outputs: int
    inputs: int
    warps: int
    stages: int


BLOCKS = (Blocks(32, 128, 4, 5), Blocks(32, 64, 4, 4), Blocks(64, 64, 4, 3))


def products(x_ND: Tensor, matrices: Sequence[Tensor], which: int) -> list[Tensor]:
    """x_ND @ matrix_OD.T of each, [N, O], by one of the BLOCKS, which divide D and all O.

    All lie in order."""
    tokens, inputs = x_ND.shape
    blocks, outputs = BLOCKS[which], [len(matrix) for matrix in matrices]
    results = [x_ND.new_empty(tokens, size) for size in outputs]
    spare = [0] * (MOST_MATRICES - len(matrices))
    tiles = [size // blocks.outputs for size in outputs + spare]
    _products[(sum(tiles),)](
        x_ND,
        *matrices,
        *[matrices[0] for _ in spare],
        *results,
        *[results[0] for _ in spare],
        tokens,
        *tiles[:2],
        *outputs,
        *[_FEWEST for _ in spare],
        inputs,
        BLOCK_N=max(triton.next_power_of_2(tokens), _FEWEST),
        BLOCK_O=blocks.outputs,
        BLOCK_D=blocks.inputs,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        **FUSED,
    )
    return results


@triton.jit(do_not_specialize=["tokens", "first_tiles", "second_tiles"])
def _products(  # type: ignore[no-untyped-def]
    x,
    first,
    second,
    third,
    of_first,
    of_second,
    of_third,
    tokens,
    first_tiles,
    second_tiles,
    first_O,
    second_O,
    third_O,
    D,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # One loop for all matrices: a loop in each branch would have shared memory of its own.
    tile, matrix, result, O = tl.program_id(0), first, of_first, first_O  # noqa: E741
    if tile >= first_tiles + second_tiles:
        tile -= first_tiles + second_tiles
        matrix, result, O = third, of_third, third_O  # noqa: E741
    elif tile >= first_tiles:
        tile -= first_tiles
        matrix, result, O = second, of_second, second_O  # noqa: E741
    n_N, d_D = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    o_O = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    there_N = (n_N < tokens)[:, None]
    x_ND = x + n_N[:, None] * D + d_D[None, :]
    matrix_DO = matrix + o_O[None, :] * D + d_D[:, None]
    sum_NO = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    for d in range(0, D, BLOCK_D):
        read_ND = tl.load(x_ND + d, mask=there_N, other=0.0)
        sum_NO += tl.dot(read_ND, tl.load(matrix_DO + d), input_precision="ieee")
    to_NO = result + n_N[:, None] * O + o_O[None, :]
    tl.store(to_NO, sum_NO.to(result.dtype.element_ty), mask=there_N)
