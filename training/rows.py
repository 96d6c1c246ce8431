"""The label rule: which heads learn what at which position.

Shapes: B batch, T tokens, K heads, R rows (supervised positions), D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_heads.config import head_offset

IGNORED = -100


def head_labels(labels_BT: Tensor, num_heads: int) -> Tensor:
    """The token that each head should predict at each position, -100 where there is none.

    `labels_BT` is unshifted: `labels[t]` is the token at t, -100 where the text was not generated
    (a prompt, padding). Head i at t predicts token t + 2 + i, and is supervised iff token t + 1 is
    generated text (only then does the engine draft from t) and token t + 2 + i is too. A row holds
    one document, so no label crosses into another.

    Returns:
        labels_BTK.
    """
    batch, tokens = labels_BT.shape
    labels_BTK = labels_BT.new_full((batch, tokens, num_heads), IGNORED)
    for i in range(num_heads):
        reach = max(tokens - head_offset(i), 0)
        labels_BTK[:, :reach, i] = labels_BT[:, head_offset(i) :]
    next_is_generated_BT = labels_BT.new_zeros((batch, tokens), dtype=torch.bool)
    next_is_generated_BT[:, :-1] = labels_BT[:, 1:] != IGNORED
    return labels_BTK.masked_fill(~next_is_generated_BT[..., None], IGNORED)


def supervised_rows(labels_BT: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """The positions where at least one head learns, gathered BEFORE the heads run.

    Returns:
        rows_R, indices into the flattened B * T positions, and labels_RK.
    """
    labels_RK = head_labels(labels_BT, num_heads).flatten(0, 1)
    rows_R = (labels_RK != IGNORED).any(dim=1).nonzero().squeeze(1)
    return rows_R, labels_RK[rows_R]


def gather_hidden(hidden_BTD: Tensor, rows_R: Tensor) -> Tensor:
    """hidden_RD at the rows of `supervised_rows`."""
    return hidden_BTD.flatten(0, 1).index_select(0, rows_R)
