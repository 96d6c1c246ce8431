"""Layers that read their own output, over whole texts at once: at every position a chain of the
true tokens begins, as long as there are steps.

Shapes: B batch (1 where all rows are alike), T tokens, S slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Chains:
    """What each step of the chains reads and sees. Where several documents are packed in a row,
    `position_ids_BT` count each from 0, and none sees another.

    Attributes:
        positions_BT: where each chain begins.
    """

    def __init__(self, input_ids_BT: Tensor, position_ids_BT: Tensor | None) -> None:
        length, device = input_ids_BT.shape[1], input_ids_BT.device
        self._ids_BT = input_ids_BT
        self._text_BTT = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None]
        if position_ids_BT is None:
            position_ids_BT = torch.arange(length, device=device)[None]
        else:
            document_BT = (position_ids_BT == 0).cumsum(dim=1)
            same_BTT = document_BT[:, :, None] == document_BT[:, None]
            self._text_BTT = self._text_BTT & same_BTT
        self._own_BTT = torch.eye(length, dtype=torch.bool, device=device).expand_as(self._text_BTT)
        self.positions_BT = position_ids_BT

    def following(self, step: int) -> Tensor:
        """The tokens that stand `step + 1` behind the chains' beginnings, [B, T]; 0 beyond the
        end."""
        return F.pad(self._ids_BT, (0, step + 1))[:, step + 1 :]

    def visible(self, again: int) -> Tensor:
        """What each position sees in a layer that reads for the `again`-th time after its first,
        [B, T, S]: of the first time the text up to it, and of each later time its own chain
        alone."""
        return torch.cat([self._text_BTT, *[self._own_BTT] * again], dim=2)
