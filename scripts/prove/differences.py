"""Where two decoded texts part, and how near a tie the target was there.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_heads.target.target import TargetModel


def after_first_difference(got_BT: Tensor, expected_BT: Tensor, prompt: int) -> int:
    """Tokens of all rows from their first difference on; all behind the prompts, where the texts
    are not equally long."""
    if got_BT.shape != expected_BT.shape:
        return expected_BT[:, prompt:].numel()
    return int((got_BT != expected_BT).long().cumsum(dim=1).clamp_max(1).sum())


@torch.no_grad()
def margins_of(
    target: TargetModel, inputs: dict[str, Tensor], got_BT: Tensor, expected_BT: Tensor
) -> Sequence[float]:
    """Where a sequence first differs: how far a plain forward's two best logits are apart there, in
    standard deviations. Rounding can only exchange what is next to equal."""
    if got_BT.shape != expected_BT.shape:
        return [float("inf")]
    margins = []
    for row in (got_BT != expected_BT).any(dim=1).nonzero().flatten().tolist():
        first = int((got_BT[row] != expected_BT[row]).nonzero()[0])
        padding = int((inputs["attention_mask"][row] == 0).sum())
        ids_1T = expected_BT[row : row + 1, padding:first]
        model: Any = target.model
        logits_V = model(ids_1T, use_cache=False).logits[0, -1].float()
        best, second = logits_V.topk(2).values.tolist()
        margins.append((best - second) / float(logits_V.std()))
    return margins
