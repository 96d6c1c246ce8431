"""What is kept of a row in the hidden-state cache, and the name it is kept under.

A name is a hash of what the row's hidden states hang on, so that rows are found again in any order,
and never those of other tokens. Shapes: B batch, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset

from medusa_heads.config import IGNORED
from medusa_heads.training.data.columns import (
    ROWS_AT_ONCE,
    SEEN_COLUMN,
    collate,
    flat,
    row_lengths,
)

# "learnt": positions whose next token is generated text. Only there do heads learn, and only there
# lies what the target teaches them: head i at t has its label, and the target its distribution, at
# t + 1 + i, and the token behind both is generated text. "all": a layer of the heads' own reads the
# whole row.
KeptPositions = Literal["learnt", "all"]
NAME_BYTES = 16


def kept_counts(rows: Dataset, kept: KeptPositions) -> Any:
    """How many positions are kept of each row (columns `input_ids`, `labels` and perhaps
    `position_ids`), [rows] int64."""
    if kept == "all":
        return row_lengths(rows).astype(np.int64)
    counts = [np.empty(0, np.int64)]
    for labels, lengths in _labels_in_parts(rows):
        ends = np.cumsum(lengths, dtype=np.int64)
        starts = ends - lengths
        learnt = labels != IGNORED
        learnt[starts[lengths > 0]] = False  # no position is before the first
        so_far = np.concatenate([[0], np.cumsum(learnt)])
        counts.append(so_far[ends] - so_far[starts])
    return np.concatenate(counts)


def _labels_in_parts(rows: Dataset) -> Iterator[tuple[Any, Any]]:
    """The labels of some rows, one behind the other, and how many each row has."""
    if rows.format["type"] == "custom":  # packed, and joined as they are read
        for batch in rows.iter(ROWS_AT_ONCE):
            yield np.concatenate(batch["labels"]), np.array([len(x) for x in batch["labels"]])
        return
    for table in rows.select_columns(["labels"]).with_format("arrow").iter(ROWS_AT_ONCE):
        yield flat(table["labels"])


def kept_positions(row: Mapping[str, Any], kept: KeptPositions) -> Any:
    """Which positions of a row are kept, an array of T booleans."""
    labels = np.asarray(row["labels"])
    if kept == "all":
        return np.ones(len(labels), bool)
    return np.append(labels[1:] != IGNORED, False)[: len(labels)]


def row_name(row: Mapping[str, Any], kept: KeptPositions) -> bytes:
    """A hash of token ids, of their positions in packed documents, of the images of the row, and of
    which are kept."""
    digest = hashlib.blake2b(digest_size=NAME_BYTES)
    for column in ("input_ids", "position_ids"):
        values = np.asarray(row.get(column, ()), np.int64)
        digest.update(np.int64(len(values)).tobytes() + values.tobytes())
    if seen := row.get(SEEN_COLUMN):
        digest.update(np.int64(seen).tobytes())
    digest.update(np.packbits(kept_positions(row, kept)).tobytes())
    return digest.digest()


def collate_named(rows: Sequence[Mapping[str, Any]], kept: KeptPositions) -> dict[str, Any]:
    """A batch as `collate` makes it, with `row_names`, a list, and `kept` [B, T] besides."""
    batch: dict[str, Any] = dict(collate(rows))
    batch["row_names"] = [row_name(row, kept) for row in rows]
    batch["kept"] = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    for kept_T, row in zip(batch["kept"], rows, strict=True):
        mask = kept_positions(row, kept)
        kept_T[: len(mask)] = torch.from_numpy(mask)
    return batch
