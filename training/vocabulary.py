"""Which tokens are worth drafting: those that the training text uses.

Shapes: V vocabulary of the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from medusa_heads.config import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset


def count_tokens(rows: Dataset, vocab_size: int) -> Tensor:
    """How often each token is a label, [V] int64.

    Args:
        rows: with a column `labels`.
        vocab_size: V.
    """
    counts_V = np.zeros(vocab_size, np.int64)
    for batch in rows.select_columns(["labels"]).with_format("numpy").iter(256):
        labels = np.concatenate(list(batch["labels"]))
        counts_V += np.bincount(labels[labels != IGNORED], minlength=vocab_size)
    return torch.from_numpy(counts_V)
