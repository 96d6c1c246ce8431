"""The label rule: which heads learn what at which position.

Shapes: B batch, T tokens, K heads, R rows (supervised positions), D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.config import IGNORED, head_offset
from medusa_heads.heads import DraftHeads


@dataclass(frozen=True)
class SupervisedRows:
    """The positions where at least one head learns.

    The target's own distribution of the token that head i learns at row r is what its lm_head makes
    of the hidden state at the flat position `positions_R[r] + 1 + i`.

    Attributes:
        positions_R: indices of t into the flattened B * T positions.
        labels_RK: token t + 2 + i, -100 where head i learns nothing.
        tokens_RK: token t + 1 + i, what sequential heads see; 0 beyond the end of the row.
    """

    positions_R: Tensor
    labels_RK: Tensor
    tokens_RK: Tensor


def supervised_rows(
    input_ids_BT: Tensor,
    labels_BT: Tensor,
    num_heads: int,
    position_ids_BT: Tensor | None = None,
) -> SupervisedRows:
    """Where heads learn, and what; gathered BEFORE the heads run."""
    labels_RK = head_labels(labels_BT, num_heads, position_ids_BT).flatten(0, 1)
    positions_R = (labels_RK != IGNORED).any(dim=1).nonzero().squeeze(1)
    padded_BT = F.pad(input_ids_BT, (0, num_heads))
    tokens_BTK = padded_BT.unfold(1, num_heads, 1)[:, 1:]
    return SupervisedRows(
        positions_R, labels_RK[positions_R], tokens_BTK.flatten(0, 1)[positions_R]
    )


def head_labels(labels_BT: Tensor, num_heads: int, position_ids_BT: Tensor | None = None) -> Tensor:
    """The token that each head should predict at each position, -100 where there is none.

    `labels_BT` is unshifted: `labels[t]` is the token at t, -100 where the text was not generated
    (a prompt, padding). Head i at t predicts token t + 2 + i, and is supervised iff token t + 1 is
    generated text (only then does the engine draft from t) and token t + 2 + i is too. Where
    several documents are packed in a row, their `position_ids` each start at 0, and no label
    crosses over.

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
    if position_ids_BT is not None:
        document_BT = (position_ids_BT == 0).cumsum(dim=1)
        for i in range(num_heads):
            reach = max(tokens - head_offset(i), 0)
            apart_BT = document_BT[:, :reach] != document_BT[:, head_offset(i) :]
            labels_BTK[:, :reach, i].masked_fill_(apart_BT, IGNORED)
    return labels_BTK.masked_fill(~next_is_generated_BT[..., None], IGNORED)


def encode_rows(
    heads: DraftHeads, hidden_BTD: Tensor, inputs: Mapping[str, Tensor], rows: SupervisedRows
) -> Tensor:
    """hidden_RD that the heads read at the supervised rows, gathered BEFORE they run."""
    encoded_BTD = heads.encode(hidden_BTD, inputs["input_ids"], inputs.get("position_ids"))
    return encoded_BTD.flatten(0, 1).index_select(0, rows.positions_R)


def per_item(total: Tensor, num_items: Tensor | int) -> Tensor:
    """A sum over all supervised items, as a mean; a batch without any gives 0, not NaN."""
    return total / (num_items.clamp(min=1) if isinstance(num_items, Tensor) else max(num_items, 1))
