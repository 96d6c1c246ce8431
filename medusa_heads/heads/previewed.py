"""Heads as drafters read them on a CPU: with a preview of a large vocabulary; see preview.py."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from medusa_heads.heads.base import AnyHeads, DraftHeads
from medusa_heads.heads.preview import CANDIDATES, VocabularyPreview, directions

SMALLEST = 16 << 20  # bytes of a vocabulary matrix from which a preview pays
_found: WeakKeyDictionary[DraftHeads, tuple[list[int], list[VocabularyPreview]]]
_found = WeakKeyDictionary()


def with_preview(heads: AnyHeads) -> AnyHeads:
    """These heads, for drafting: a view of them with a preview of their vocabulary, where that
    pays, or they themselves. The view shares every weight; a target's vocabulary that is shared
    later, or own matrices that are trained on, it does not see.
    """
    config = heads.config
    own = config.vocab_matrix == "own"
    matrices = [heads.vocab_matrix(i) for i in range(config.num_heads if own else 1)]
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
