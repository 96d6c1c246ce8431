"""The likeliest tokens without a pass over the whole vocabulary matrix.

On a CPU, drafting from a large vocabulary is bound by reading that matrix. A thin one, the matrix
in the few directions in which it varies most, tells which tokens can be likely; only their rows of
the real one are read. Drafts need no more: what is committed is the target's own choice.

Shapes: R rows (any leading dimensions), D hidden, V vocabulary, W width of the preview,
C candidates, S sampled tokens.
Source: Shim et al. 2017, "SVD-softmax: fast softmax approximation on large vocabulary neural
networks", NeurIPS 2017.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from medusa_heads.heads.base import AnyHeads, DraftHeads

CANDIDATES = 256
READ_AT_MOST = 0.25  # of the matrix's rows, counted for each row of features; else all are cheaper
SMALLEST = 16 << 20  # bytes of a vocabulary matrix from which a preview pays
_SAMPLED = 16384  # tokens from which the directions are found


class VocabularyPreview:
    """Logits that are exact for the likeliest tokens, and near for all others. Of the demo's heads'
    8 best tokens of 4,096, an eighth of the width finds 99.6 %, and of their best ones 99.9 %. The
    directions, see below, are orthonormal."""

    def __init__(self, weight_VD: Tensor, bias_V: Tensor | None, directions_DW: Tensor) -> None:
        self._weight_VD, self._bias_V = weight_VD, bias_V
        self._directions_WD = directions_DW.T.to(weight_VD.dtype).contiguous()
        self._thin_VW = weight_VD @ directions_DW.to(weight_VD.dtype)

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """What it keeps beside the matrix: the directions [W, D], and the thin matrix [V, W]."""
        return self._directions_WD, self._thin_VW

    def pays(self, features_RD: Tensor) -> bool:
        """Whether this takes less time than the whole matrix: of many rows, each has candidates of
        its own to read. And a model may have been moved from the CPU meanwhile."""
        if features_RD.device != self._thin_VW.device:
            return False
        rows = features_RD.numel() // features_RD.shape[-1]
        return rows * CANDIDATES <= READ_AT_MOST * len(self._weight_VD)

    def logits(self, features_RD: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        x_RD = features_RD.flatten(0, -2).to(self._weight_VD.dtype)
        logits_RV = (x_RD @ self._directions_WD.T) @ self._thin_VW.T
        if self._bias_V is not None:
            logits_RV += self._bias_V
        likeliest_RC = logits_RV.topk(CANDIDATES, dim=-1, sorted=False).indices
        rows_RCD = self._weight_VD.index_select(0, likeliest_RC.flatten())
        rows_RCD = rows_RCD.unflatten(0, likeliest_RC.shape)
        exact_RC = torch.bmm(rows_RCD, x_RD[:, :, None])[:, :, 0]
        if self._bias_V is not None:
            exact_RC += self._bias_V[likeliest_RC]
        return logits_RV.scatter_(1, likeliest_RC, exact_RC).unflatten(0, features_RD.shape[:-1])


def directions(matrices: Sequence[Tensor], width: int) -> Tensor:
    """The directions [D, W] in which vocabulary matrices [V, D] together vary most, the least of
    them first; found from some tens of thousand of their rows."""
    each = -(-_SAMPLED // len(matrices))
    rows_SD = torch.cat([weight_VD[:: max(len(weight_VD) // each, 1)] for weight_VD in matrices])
    rows_SD = rows_SD.float()
    return torch.linalg.eigh(rows_SD.T @ rows_SD).eigenvectors[:, -width:]


_found: WeakKeyDictionary[DraftHeads, tuple[list[int], list[VocabularyPreview]]]
_found = WeakKeyDictionary()


def with_preview(heads: AnyHeads) -> AnyHeads:
    """These heads, for drafting: a view of them with a preview of their vocabulary, where that
    pays, or they themselves. The view shares every weight; a target's vocabulary that is shared
    later, or own matrices that are trained on, it does not see.
    """
    matrices = [heads.vocab_matrix(i) for i in range(heads.num_matrices)]
    weight_VD = matrices[0][0]
    plain = weight_VD.device.type == "cpu" and type(weight_VD.data) is Tensor
    width = weight_VD.shape[1] // 8
    large = weight_VD.numel() * weight_VD.element_size() >= SMALLEST
    if not plain or not large or width < 1 or len(weight_VD) < 8 * CANDIDATES:
        return heads
    view = copy.copy(heads)
    view.previews = _previews(heads, matrices, width)
    return view


@torch.no_grad()
def _previews(
    heads: DraftHeads, matrices: Sequence[tuple[Tensor, Tensor | None]], width: int
) -> list[VocabularyPreview]:
    """Found once for as long as the heads and their matrices stay where they are: with a width of
    thousands that takes many seconds."""
    places = [weight_VD.data_ptr() for weight_VD, _ in matrices]
    if heads not in _found or _found[heads][0] != places:
        basis_DW = directions([weight_VD for weight_VD, _ in matrices], width)
        previews = [VocabularyPreview(weight, bias, basis_DW) for weight, bias in matrices]
        _found[heads] = places, previews
    return _found[heads][1]
