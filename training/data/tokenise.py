"""From a corpus's rows to a table of rows of tokens, as a whole or in parts on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets

from medusa_heads.data.formats import DOCUMENT_COLUMN
from medusa_heads.data.sources import Corpus
from medusa_heads.training.data.columns import (
    lengths_in_parts,
    picked,
    row_columns,
    token_features,
    write_numbers,
)
from medusa_heads.training.data.prepared import write_whole
from medusa_heads.training.data.seen import UNFIT
from medusa_heads.training.data.tokeniser import Tokeniser

logger = logging.getLogger(__name__)

_SPREAD = 256  # rows from all over the corpus, by which the library that encodes is chosen
_ROWS_OF_A_PART = 200_000  # an interrupted preparation goes on behind the last part
_BATCH = 8 << 20  # bytes of the corpus that become one batch of a file
_MOST_ROWS_OF_A_BATCH = 5000


def tokenise(
    corpus: Corpus, tokeniser: Tokeniser, num_proc: int | None = None, folder: Path | None = None
) -> Corpus:
    """A table as rows of tokens, none longer than `max_length`, in the columns `input_ids`,
    `labels` and `document`, the row of the corpus that each is a part of. They are written to
    `folder` in parts, and parts that are there are read; by default they stay in memory. Raises
    ValueError at broken rows, unless they may be left out, or where no row is left."""
    parts = [
        _part(corpus, tokeniser, start, num_proc, folder)
        for start in range(0, max(len(corpus.rows), 1), _ROWS_OF_A_PART)
    ]
    made = concatenate_datasets(parts)
    broken = np.flatnonzero(made.data.column("problem").is_valid().to_numpy())
    unfit = 0
    for row in made.select(broken):
        if row["problem"] == UNFIT:
            unfit += 1
            continue
        place = row["place"] or corpus.place(row["document"])
        corpus.bad_rows.add(place, row["problem"])
    corpus.bad_rows.settle()
    lost = made.data.column("lost")
    documents, tokens = pc.sum(pc.greater(lost, 0)).as_py() or 0, pc.sum(lost).as_py() or 0
    if documents:
        logger.warning(
            "%d documents of %s were longer than max_length %d: %d supervised tokens were cut off",
            documents,
            corpus.name,
            tokeniser.max_length,
            tokens,
        )
    rows = row_columns(made, DOCUMENT_COLUMN)
    if len(broken):
        rows = _without(rows, broken, folder)
    told = f"{unfit} rows of {corpus.name} were left out: within max_length {tokeniser.max_length} "
    if unfit and not len(rows):
        raise ValueError(f"all {told}{UNFIT}: raise max_length")
    if unfit:
        logger.warning("%s%s", told, UNFIT)
    if not len(rows):
        raise ValueError(f"the corpus is empty: give one with text in it ({corpus.name})")
    return replace(corpus, rows=rows, cut_documents=documents, cut_tokens=tokens)


def _without(rows: Dataset, broken: Any, folder: Path | None) -> Dataset:
    fine = np.setdiff1d(np.arange(len(rows)), broken)
    if folder is None:
        return rows.select(fine)
    file = folder / "fine.arrow"
    if not file.exists():
        write_whole(file, lambda path: write_numbers(path, rows, fine))
    return picked(rows, file)


def _part(
    corpus: Corpus, tokeniser: Tokeniser, start: int, num_proc: int | None, folder: Path | None
) -> Dataset:
    """What becomes of the rows from `start` on, as it was written, or is written now."""
    rows = corpus.rows.select(range(start, min(start + _ROWS_OF_A_PART, len(corpus.rows))))
    numbers = are_numbers(corpus)

    def make(file: str | None) -> Dataset:
        if not numbers:
            spread = np.linspace(0, len(corpus.rows) - 1, min(_SPREAD, len(corpus.rows)))
            tokeniser.settle(corpus.rows[spread.astype(np.int64)])
        return rows.with_format("arrow" if numbers else None).map(
            partial(_counted, tokeniser, start),
            batched=True,
            batch_size=_rows_of_a_batch(rows),
            writer_batch_size=_MOST_ROWS_OF_A_BATCH,
            with_indices=True,
            remove_columns=rows.column_names,
            features=token_features(shown=tokeniser.shown),
            load_from_cache_file=False,
            cache_file_name=file,
            keep_in_memory=file is None,
            # Else the tokenizer would be hashed for one, which is written into the file.
            new_fingerprint=uuid4().hex if folder is None else f"{folder.name}-{start}",
            num_proc=num_proc,
            desc="Tokenising",
        )

    if folder is None:
        return make(None).with_format(None)
    name = f"rows-{start}"
    if not (folder / name).exists():
        write_whole(folder / name, lambda path: make(str(path / "part.arrow")))
    # Not what datasets keeps beside them, where a user maps or sorts the rows.
    files = sorted((folder / name).glob("part*.arrow"))
    return concatenate_datasets([Dataset.from_file(str(file)) for file in files])


def _rows_of_a_batch(rows: Dataset) -> int:
    """Each batch of a file takes kilobytes of every process that reads it, so few are better; but
    all rows of one are tokenised at once."""
    return max(
        min(_BATCH * rows.data.num_rows // max(rows.data.nbytes, 1), _MOST_ROWS_OF_A_BATCH), 1
    )


def _counted(function: Callable[..., Any], start: int, batch: Any, places: Sequence[int]) -> Any:
    """The rows of a part, by their numbers in the whole."""
    return function(batch, [start + place for place in places])


def document_numbers(corpus: Corpus, rows: Dataset) -> Any:
    """The number of the document that each row of tokens of a corpus is a part of, [rows]: of
    tokens by the column of that name, if it holds numbers or names. A row that names none is a
    document of its own."""
    numbers = np.arange(len(rows), dtype=np.int32)
    if DOCUMENT_COLUMN in rows.column_names:
        numbers = rows.with_format("numpy")[DOCUMENT_COLUMN][:]
    kind = str(getattr(corpus.rows.features.get(DOCUMENT_COLUMN), "dtype", ""))
    if corpus.format.name != "tokens" or (kind != "string" and "int" not in kind):
        return numbers
    names = corpus.rows.select_columns([DOCUMENT_COLUMN]).with_format("arrow")[:][DOCUMENT_COLUMN]
    codes = names.combine_chunks().dictionary_encode().indices
    named = np.arange(len(codes))
    known = codes.is_valid().to_numpy(False)
    _, firsts, inverse = np.unique(codes.drop_null(), return_index=True, return_inverse=True)
    named[known] = named[known][firsts][inverse]
    return named[numbers]


def is_ready(corpus: Corpus, tokeniser: Tokeniser) -> bool:
    """Whether a table of tokens can be taken as it is, without a look at each of them."""
    if tokeniser.limits is not None or not are_numbers(corpus):
        return False
    rows = corpus.rows.select_columns(["input_ids", "labels"])
    if any(column.null_count for column in rows.data.columns):
        return False
    return all(part.max() <= tokeniser.max_length for part in lengths_in_parts(rows))


def are_numbers(corpus: Corpus) -> bool:
    """Whether a corpus is a table of tokens whose columns can hold nothing else."""
    if corpus.format.name != "tokens":
        return False
    kinds = [
        getattr(corpus.rows.features[name], "feature", None) for name in ("input_ids", "labels")
    ]
    return all("int" in str(getattr(kind, "dtype", "")) for kind in kinds)
