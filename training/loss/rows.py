"""The label rule: which heads learn what at which position, and what a model's own lm_head learns.

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
from medusa_heads.training.loss.fused import Pairs


@dataclass(frozen=True)
class SupervisedRows:
    """The positions where at least one head learns: indices of t into the flattened B * T
    positions, token t + 2 + i (-100 where head i learns nothing), and token t + 1 + i, what
    sequential heads see (0 beyond the end of the row). The target's own distribution of the token
    that head i learns at row r is what its lm_head makes of the hidden state at the flat position
    `positions_R[r] + 1 + i`."""

    positions_R: Tensor
    labels_RK: Tensor
    tokens_RK: Tensor


def supervised_rows(
    input_ids_BT: Tensor, labels_BT: Tensor, num_heads: int, position_ids_BT: Tensor | None = None
) -> SupervisedRows:
    """Where heads learn, and what."""
    labels_RK = head_labels(labels_BT, num_heads, position_ids_BT).flatten(0, 1)
    positions_R = (labels_RK != IGNORED).any(dim=1).nonzero().squeeze(1)
    tokens_BTK = F.pad(input_ids_BT, (0, num_heads)).unfold(1, num_heads, 1)[:, 1:]
    tokens_RK = tokens_BTK.flatten(0, 1)[positions_R]
    return SupervisedRows(positions_R, labels_RK[positions_R], tokens_RK)


def head_labels(labels_BT: Tensor, num_heads: int, position_ids_BT: Tensor | None = None) -> Tensor:
    """labels_BTK: the token that each head should predict at each position, -100 where there is
    none.

    `labels_BT` is unshifted: `labels[t]` is the token at t, -100 where the text was not generated
    (a prompt, padding). Head i at t predicts token t + 2 + i, and is supervised iff that and all
    tokens from t + 1 on are generated text: only then does the engine draft it from t. Where
    several documents are packed in a row, their `position_ids` each start at 0, and no label
    crosses over.
    """
    offsets = (1, *(head_offset(i) for i in range(num_heads)))
    ahead = [_ahead(labels_BT, offset, position_ids_BT) for offset in offsets]
    generated_BTO = torch.stack([label_BT != IGNORED for label_BT in ahead], dim=2).cumprod(dim=2)
    return torch.stack(ahead[1:], dim=2).where(generated_BTO[..., 1:] > 0, IGNORED)


def next_rows(labels_BT: Tensor, position_ids_BT: Tensor | None = None) -> Pairs:
    """All positions whose next token is supervised and of the same document, with that token;
    arguments as those of `head_labels`."""
    next_P = _ahead(labels_BT, 1, position_ids_BT).flatten()
    positions_N = (next_P != IGNORED).nonzero()[:, 0]
    return Pairs(next_P[positions_N], positions_N)


def _ahead(labels_BT: Tensor, distance: int, position_ids_BT: Tensor | None = None) -> Tensor:
    """The label so many tokens ahead, -100 behind the end of the row or of the document."""
    ahead_BT = F.pad(labels_BT, (0, distance), value=IGNORED)[:, distance:]
    if position_ids_BT is None:
        return ahead_BT
    # A token that stands less than this far into its document is of a later one.
    reached_BT = F.pad(position_ids_BT, (0, distance))[:, distance:]
    return ahead_BT.masked_fill(reached_BT < distance, IGNORED)


def read_rows(
    heads: DraftHeads, hidden_BTD: Tensor, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, SupervisedRows]:
    """The supervised rows of a batch, and hidden_RD that the heads read there, gathered BEFORE they
    run."""
    ids_BT, positions_BT = inputs["input_ids"], inputs.get("position_ids")
    rows = supervised_rows(ids_BT, inputs["labels"], heads.config.num_heads, positions_BT)
    encoded_BTD = heads.encode(hidden_BTD, ids_BT, positions_BT)
    return encoded_BTD.flatten(0, 1).index_select(0, rows.positions_R), rows


def per_item(total: Tensor, num_items: Tensor | int) -> Tensor:
    """A sum over all supervised items, as a mean; a batch without any gives 0, not NaN."""
    return total / (num_items.clamp(min=1) if isinstance(num_items, Tensor) else max(num_items, 1))
