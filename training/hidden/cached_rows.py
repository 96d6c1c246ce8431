"""What is kept of a row in the hidden-state cache, and the name it is kept under.

A name is a hash of what the row's hidden states hang on, so that rows are found again in any order,
and never those of other tokens. Shapes: B batch, T tokens, W 64-bit words of a name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.training.data.prepare import collate

if TYPE_CHECKING:
    from datasets import Dataset

# "learnt": positions whose next token is generated text. Only there do heads learn, and only there
# lies what the target teaches them: head i at t has its label, and the target its distribution, at
# t + 1 + i, and the token behind both is generated text. "all": a layer of the heads' own reads the
# whole row.
KeptPositions = Literal["learnt", "all"]
_NAME_BYTES = 16


@dataclass(frozen=True)
class RowPlan:
    """What a cache of a dataset holds when it is complete.

    Args:
        counts: kept positions of each row, by the row's name. Rows without any are left out.
        rows: of the dataset; equal ones share a name.
    """

    counts: Mapping[str, int]
    rows: int

    @property
    def positions(self) -> int:
        """All that are kept."""
        return sum(self.counts.values())

    def sha256(self) -> str:
        """The same for the same rows in another order."""
        return hashlib.sha256("".join(sorted(self.counts)).encode()).hexdigest()


def plan_rows(rows: Dataset, kept: KeptPositions) -> RowPlan:
    """Read a dataset once: columns `input_ids`, `labels` and perhaps `position_ids`."""
    columns = [c for c in ("input_ids", "labels", "position_ids") if c in rows.column_names]
    counts = {}
    for batch in rows.select_columns(columns).with_format("numpy").iter(256):
        for values in zip(*(batch[column] for column in columns), strict=True):
            row = dict(zip(columns, values, strict=True))
            count = int(kept_positions(row, kept).sum())
            if count:
                counts[row_name(row, kept)] = count
    return RowPlan(counts, len(rows))


def kept_positions(row: Mapping[str, Any], kept: KeptPositions) -> Any:
    """Which positions of a row are kept, an array of T booleans."""
    labels = np.asarray(row["labels"])
    mask = np.ones(len(labels), bool)
    if kept == "learnt":
        mask[:-1] = labels[1:] != IGNORED
        mask[-1:] = False
    return mask


def row_name(row: Mapping[str, Any], kept: KeptPositions) -> str:
    """A hash of token ids, of their positions in packed documents, and of which are kept."""
    digest = hashlib.blake2b(digest_size=_NAME_BYTES)
    for column in ("input_ids", "position_ids"):
        values = np.asarray(row.get(column, ()), np.int64)
        digest.update(np.int64(len(values)).tobytes() + values.tobytes())
    digest.update(np.packbits(kept_positions(row, kept)).tobytes())
    return digest.hexdigest()


def collate_named(rows: Sequence[Mapping[str, Any]], kept: KeptPositions) -> dict[str, Tensor]:
    """A batch as `collate` makes it, with `row_names` [B, W] and `kept` [B, T] besides."""
    batch = collate(rows)
    kept_BT = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    for b, row in enumerate(rows):
        mask = torch.from_numpy(kept_positions(row, kept))
        kept_BT[b, : len(mask)] = mask
    names = b"".join(bytes.fromhex(row_name(row, kept)) for row in rows)
    words_BW = torch.from_numpy(np.frombuffer(names, np.int64).copy()).view(len(rows), -1)
    return {**batch, "row_names": words_BW, "kept": kept_BT}


def names_of(words_BW: Tensor) -> Iterable[str]:
    """The names that `collate_named` put into a batch."""
    return (row.tobytes().hex() for row in words_BW.cpu().numpy())
