"""What each head reads for itself, beside what all of them read, in sums for least squares.

Shapes: R rows, K heads, C columns of all that heads read, V columns that a head reads for itself,
D hidden, E = K * D.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Ridge: columns over rows, times this, is added to each square's share of one, as for weights that
# are expected to explain about as much as they leave. Best within a factor of three from 1.3 to 80
# rows a column.
RIDGE = 0.3


class SumsBeside:
    """Products of what each head reads for itself with what all read [K, C, V], with itself
    [K, V, V], and with what it should make of it [K, V, D], summed over rows."""

    def __init__(self, num_heads: int, shared: int, own: int, width: int, like: Tensor) -> None:
        self.shared_KCV = like.new_zeros(num_heads, shared, own)
        self.own_KVV = like.new_zeros(num_heads, own, own)
        self.made_KVD = like.new_zeros(num_heads, own, width)

    def add(self, read_RC: Tensor, own_RKV: Tensor, made_RE: Tensor) -> None:
        """Take in some rows."""
        made_KDR = made_RE.unflatten(1, (len(self.own_KVV), -1)).permute(1, 2, 0)
        for i, own_RV in enumerate(own_RKV.float().unbind(1)):
            self.shared_KCV[i].addmm_(read_RC.T, own_RV)
            self.own_KVV[i].addmm_(own_RV.T, own_RV)
            self.made_KVD[i].addmm_(own_RV.T, made_KDR[i].T)

    def parts(self) -> tuple[Tensor, ...]:
        """The sums, to be added up over processes."""
        return self.shared_KCV, self.own_KVV, self.made_KVD

    def map_of(self, head: int, read_CC: Tensor, made_CD: Tensor, rows: int) -> Tensor | None:
        """What comes closest to what a head should make of so many of the columns that all read,
        and of its own behind them, [C + V, D]; None where there is no such."""
        shared_CV = self.shared_KCV[head, : len(read_CC)]
        upper_CX = torch.cat([read_CC, shared_CV], dim=1)
        lower_VX = torch.cat([shared_CV.T, self.own_KVV[head]], dim=1)
        factor_XX, failed = ridged(torch.cat([upper_CX, lower_VX]), rows)
        if failed:
            return None
        return torch.cholesky_solve(torch.cat([made_CD, self.made_KVD[head]]), factor_XX)


def ridged(sums_CC: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The triangle of sums with the ridge, and whether there is none."""
    diagonal_C = sums_CC.diagonal()
    ridge_C = (diagonal_C * RIDGE * len(diagonal_C) / rows).clamp_min(1e-6)
    diagonal_C += ridge_C
    factor_CC, failed = torch.linalg.cholesky_ex(sums_CC)
    diagonal_C -= ridge_C
    return factor_CC, failed
