"""Columns of rows of tokens: their types, read as arrays without a look at each row, and joined to
batches. Shapes: B batch, T tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, List, Value
from datasets.table import InMemoryTable, MemoryMappedTable
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from medusa_heads.config import IGNORED
from medusa_heads.data.images import IMAGES_COLUMN, stored_images

SEEN_COLUMN = "seen"
"""Of a table of tokens, beside images: a hash of them as the target is shown them, 0 of none."""

ROWS_AT_ONCE = 256
"""So many rows are in memory while a table is read."""


def token_features(*, shown: bool) -> Features:
    """Types of the columns that a Tokeniser makes, perhaps of rows with images."""
    kinds = {"document": "int64", "problem": "string", "place": "string", "lost": "int64"}
    features = {**row_features(), **{name: Value(kind) for name, kind in kinds.items()}}
    if shown:
        features |= {IMAGES_COLUMN: stored_images(), SEEN_COLUMN: Value("int64")}
    return Features(features)


def row_features(*more: str) -> Features:
    """Types of the columns of rows of tokens."""
    return Features({name: List(Value("int32")) for name in ("input_ids", "labels", *more)})


def row_columns(rows: Dataset, *more: str) -> Dataset:
    """The columns that training reads alone, and further ones: tokens, labels, and images where
    some row has any."""
    names = ["input_ids", "labels", *more]
    if len(seen := seen_hashes(rows)) and seen.any():
        names += [IMAGES_COLUMN, SEEN_COLUMN]
    return rows.select_columns(names)


def seen_hashes(rows: Dataset) -> Any:
    """Of each row the hash of its images, [rows] int64; empty of a table without."""
    if SEEN_COLUMN not in rows.column_names:
        return np.empty(0, np.int64)
    return rows.select_columns([SEEN_COLUMN]).with_format("numpy")[:][SEEN_COLUMN]


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch padded on the right: input_ids_BT, labels_BT, and attention_mask_BT (0 is padding).
    Packed rows have position_ids_BT in place of the mask, which would let documents see each other.
    There, padding is a document of its own, behind the others."""

    def padded(name: str, fill: int) -> Tensor:
        parts = [torch.as_tensor(row[name], dtype=torch.long) for row in rows]
        return pad_sequence(parts, batch_first=True, padding_value=fill)

    batch = {"input_ids": padded("input_ids", 0), "labels": padded("labels", IGNORED)}
    lengths_B1 = torch.tensor([len(row["input_ids"]) for row in rows])[:, None]
    behind_BT = torch.arange(batch["input_ids"].shape[1]) - lengths_B1
    if "position_ids" in rows[0]:
        positions_BT = padded("position_ids", 0)
        batch["position_ids"] = torch.where(behind_BT < 0, positions_BT, behind_BT)
    else:
        batch["attention_mask"] = (behind_BT < 0).long()
    return batch


def flat(column: pa.ChunkedArray) -> tuple[Any, Any]:
    """The values of all rows, one behind the other, and how many each row has."""
    whole = column.combine_chunks()
    values = whole.flatten().to_numpy(zero_copy_only=False)
    return values, pc.list_value_length(whole).to_numpy(zero_copy_only=False)


def row_lengths(rows: Dataset) -> Any:
    """How many tokens each row has, packed or not, [rows] int32."""
    if "tokens" in rows.column_names:
        return rows.data.column("tokens").to_numpy()
    return np.concatenate([np.empty(0, np.int32), *lengths_in_parts(rows)], dtype=np.int32)


def row_digests(rows: Dataset, column: str) -> Any:
    """A hash of what each row has in a column of lists of numbers or of texts, [rows] uint64."""
    found = [np.empty(0, np.uint64)]
    for table in rows.select_columns([column]).with_format("arrow").iter(100 * ROWS_AT_ONCE):
        if pa.types.is_nested(table[column].type):
            values, lengths = flat(table[column])
            whole, ends = memoryview(values.tobytes()), np.cumsum(lengths) * values.itemsize
            contents: Any = (whole[a:b] for a, b in pairwise([0, *ends.tolist()]))
        else:
            contents = ((text or "").encode() for text in table[column].to_pylist())
        digests = b"".join(blake2b(each, digest_size=8).digest() for each in contents)
        found.append(np.frombuffer(digests, np.uint64))
    return np.concatenate(found)


def learnt_whole(rows: Dataset) -> Dataset:
    """The same rows of tokens, of which all are learnt. Nothing is written anywhere, nor copied
    where labels are of the tokens' own type."""
    table = rows.data.table
    place = table.column_names.index("labels")
    labels = table.column("input_ids").cast(table.schema.types[place])
    learnt = InMemoryTable(table.set_column(place, "labels", labels))
    return Dataset(learnt, rows.info.copy(), indices_table=rows._indices)


def stretches(mask: Any) -> Any:
    """Where the stretches that a mask [places] holds for begin and end, [stretches, 2]."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return edges.reshape(-1, 2)


def lengths_in_parts(rows: Dataset) -> Iterator[Any]:
    """The same of unpacked rows, some thousands at a time."""
    for table in rows.select_columns(["input_ids"]).with_format("arrow").iter(100 * ROWS_AT_ONCE):
        yield pc.list_value_length(table["input_ids"]).to_numpy()


def write_numbers(path: Path, rows: Dataset, numbers: Any) -> None:
    """The numbers of some rows as a file that `picked` reads."""
    if rows._indices is not None:  # then rows of the table beneath are meant
        numbers = rows._indices.column(0).to_numpy()[numbers]
    write_table(path, pa.table({"indices": pa.array(numbers, pa.uint64())}))


def picked(rows: Dataset, path: Path) -> Dataset:
    """Those rows alone; their numbers stay on disk, as the rows do."""
    numbers = MemoryMappedTable.from_file(str(path))
    return Dataset(rows.data, rows.info.copy(), indices_table=numbers)


def write_table(path: Path, table: pa.Table) -> None:
    """As a file that `datasets` maps from disk."""
    with pa.ipc.new_stream(path, table.schema) as file:
        file.write_table(table, max_chunksize=400 * ROWS_AT_ONCE)
