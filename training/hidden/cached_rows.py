"""What is kept of a row in the hidden-state cache, and the name it is kept under.

A name is a hash of what the row's hidden states hang on, so that rows are found again in any order,
and never those of other tokens. Shapes: B batch, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset

from medusa_heads.config import IGNORED
from medusa_heads.training.data.prepare import collate

# "learnt": positions whose next token is generated text. Only there do heads learn, and only there
# lies what the target teaches them: head i at t has its label, and the target its distribution, at
# t + 1 + i, and the token behind both is generated text. "all": a layer of the heads' own reads the
# whole row.
KeptPositions = Literal["learnt", "all"]


@dataclass(frozen=True)
class RowPlan:
    """What a cache of a dataset holds when it is complete: how many positions of each row, by the
    row's name (rows without any left out), and how many rows there are."""

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
    counts = {}
    arrays = rows if rows.format["type"] == "custom" else rows.with_format("numpy")  # if packed
    for batch in arrays.iter(256):
        for values in zip(*batch.values(), strict=True):
            row = dict(zip(batch, values, strict=True))
            if count := int(kept_positions(row, kept).sum()):
                counts[row_name(row, kept)] = count
    return RowPlan(counts, len(rows))


def kept_positions(row: Mapping[str, Any], kept: KeptPositions) -> Any:
    """Which positions of a row are kept, an array of T booleans."""
    labels = np.asarray(row["labels"])
    if kept == "all":
        return np.ones(len(labels), bool)
    return np.append(labels[1:] != IGNORED, False)[: len(labels)]


def row_name(row: Mapping[str, Any], kept: KeptPositions) -> str:
    """A hash of token ids, of their positions in packed documents, and of which are kept."""
    digest = hashlib.blake2b(digest_size=16)
    for column in ("input_ids", "position_ids"):
        values = np.asarray(row.get(column, ()), np.int64)
        digest.update(np.int64(len(values)).tobytes() + values.tobytes())
    digest.update(np.packbits(kept_positions(row, kept)).tobytes())
    return digest.hexdigest()


def collate_named(rows: Sequence[Mapping[str, Any]], kept: KeptPositions) -> dict[str, Any]:
    """A batch as `collate` makes it, with `row_names`, a list, and `kept` [B, T] besides."""
    batch: dict[str, Any] = dict(collate(rows))
    batch["row_names"] = [row_name(row, kept) for row in rows]
    batch["kept"] = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    for kept_T, row in zip(batch["kept"], rows, strict=True):
        mask = kept_positions(row, kept)
        kept_T[: len(mask)] = torch.from_numpy(mask)
    return batch
