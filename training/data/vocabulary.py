"""Which tokens are worth drafting: those that the training text uses.

Shapes: V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.training.data.sources import is_stream

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

TOKENS_PER_ENTRY = 256
"""So many tokens of a stream are counted for each token that can be drafted."""

_SHARDS = 64


def count_tokens(rows: Dataset | IterableDataset, vocab_size: int, most: int) -> Tensor:
    """How often each token is a label, [V] int64.

    Args:
        rows: with a column `labels`; or one pass over those of a stream.
        vocab_size: V.
        most: about so many labels of a stream are counted, from all over its files.
    """
    counts_V = np.zeros(vocab_size, np.int64)
    for labels in _of_stream(rows, most) if is_stream(rows) else _of_table(rows):
        counts_V += np.bincount(labels, minlength=vocab_size)
    return torch.from_numpy(counts_V)


def _of_table(rows: Any) -> Iterator[Any]:
    for batch in rows.select_columns(["labels"]).with_format("numpy").iter(256):
        labels = np.concatenate(list(batch["labels"]))
        yield labels[labels != IGNORED]


def _of_stream(rows: Any, most: int) -> Iterator[Any]:
    """Labels of up to 64 parts, the same number of each: files may be sorted, by language say."""
    parts = min(rows.num_shards, _SHARDS)
    for index in range(parts):
        left = most / parts
        for batch in rows.shard(num_shards=parts, index=index).iter(64):
            labels = np.concatenate([np.asarray(row, np.int64) for row in batch["labels"]])
            labels = labels[labels != IGNORED]
            yield labels
            left -= len(labels)
            if left <= 0:
                break
