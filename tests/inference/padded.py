"""Batches whose rows are not equally long."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.conftest import DEVICE


def padded(padding: Sequence[int], length: int, tokens: range = range(3, 24)) -> dict[str, Tensor]:
    """Random prompts as generate() takes them, each padded on the left by so many tokens."""
    random = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(tokens.start, tokens.stop, (len(padding), length), generator=random)
    mask_BT = (torch.arange(length) >= torch.tensor(padding)[:, None]).long()
    return {"input_ids": ids_BT.to(DEVICE), "attention_mask": mask_BT.to(DEVICE)}
