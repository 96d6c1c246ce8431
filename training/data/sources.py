"""Where corpora come from: the embedded one, files, folders and the hub."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from medusa_heads.data.bad_rows import BadRows
from medusa_heads.data.data_files import SUFFIXES, has_known_suffix
from medusa_heads.data.formats import CONTEXT_COLUMN, DOCUMENT_COLUMN, Format, recognise
from medusa_heads.files import expanded
from medusa_heads.training.data.folders import files_of_split, is_saved_dataset, saved_dataset
from medusa_heads.training.data.hub_dataset import load_hub_dataset
from medusa_heads.training.data.readers import (
    PLACE_COLUMN,
    first_format,
    plain_rows,
    table_features,
)

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

HELD_OUT = "held_out"
"""The split to measure on: `held_out`, or what else a corpus calls it."""

_HELD_OUT_NAMES = (HELD_OUT, "test", "validation", "valid", "val", "eval", "dev")
_ROWS_AT_ONCE = 1000


@dataclass
class Corpus:
    """Text to learn from, not yet tokenised.

    Args:
        name: for messages.
        rows: a table, or a stream of rows; of plain text, its column is `text`.
        format: how a row is read.
        found_as: the columns in which the corpus came.
        bad_rows: those that could not be read so far, and what to do about others.
        counted: name and rows of each part of a table.
    """

    name: str
    rows: Dataset | IterableDataset
    format: Format
    found_as: str
    bad_rows: BadRows = field(default_factory=BadRows)
    counted: list[tuple[str, int]] = field(default_factory=list)

    @property
    def is_stream(self) -> bool:
        """Whether the rows are a stream rather than a table."""
        return is_stream(self.rows)

    def place(self, index: int) -> str:
        """What to call row `index`, where the row itself does not know its place."""
        for name, rows in self.counted:
            if index < rows:
                return f"{name} row {index + 1}"
            index -= rows
        return f"{self.name} row {index + 1}"


def load_corpus(
    name: str | Sequence[str],
    split: str = "train",
    *,
    config: str | None = None,
    text_column: str | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    streaming: bool = False,
) -> Corpus:
    """Find and read a corpus.

    Args:
        name: `stdlib`, a hub id, a folder or a file; or several of those, globs among them, whose
            rows then are of one format.
        split: of a corpus that has some; `"held_out"` stands for the usual names.
        config: of a hub dataset.
        text_column: the column that holds plain text.
        on_bad_row: what to do about rows that cannot be used.
        streaming: hand on a stream, which is read as it is used.

    Raises:
        ValueError: nothing stands there, or it cannot be read.
    """
    bad_rows = BadRows(on_bad_row, stream=streaming)
    parts = [
        _load_one(one, split, config, text_column, bad_rows, streaming) for one in find_names(name)
    ]
    bad_rows.settle()
    for corpus in parts:
        if corpus.format != parts[0].format or corpus.found_as != parts[0].found_as:
            raise ValueError(
                f"expected corpora of one format, but {parts[0].name!r} has {parts[0].found_as} "
                f"and {corpus.name!r} has {corpus.found_as}: bring them into one"
            )
    return parts[0] if len(parts) == 1 else _join(parts)


def as_corpus(
    rows: Dataset | IterableDataset,
    name: str,
    *,
    text_column: str | None = None,
    bad_rows: BadRows | None = None,
) -> Corpus:
    """A dataset in memory, or a stream, as a corpus.

    Raises:
        ValueError: it is empty, or its columns are of no known format.
    """
    if isinstance(rows, dict):  # of splits
        raise ValueError(f"{name} has the splits {sorted(rows)}: give one of them")
    rows = rows.with_format(None)
    if is_stream(rows):
        columns, counted = list(next(iter(rows), {})), []
    else:
        columns, counted = (rows.column_names if len(rows) else []), [(name, len(rows))]
    if not columns:
        raise ValueError(f"the corpus is empty: give one with text in it ({name})")
    found = recognise(columns, text_column)
    found_as = str(found)
    if found.name == "text" and found.columns != ("text",):
        rows = rows.select_columns(list(found.columns)).rename_columns({found.columns[0]: "text"})
        found = recognise(["text"])
    return Corpus(name, rows, found, found_as, bad_rows or BadRows(), counted)


def is_stream(rows: Dataset | IterableDataset) -> bool:
    """Whether a dataset is read row by row, and is never all there."""
    from datasets import Dataset

    return not isinstance(rows, Dataset)


def find_names(name: str | Sequence[str]) -> list[str]:
    """Names of corpora one by one: lists taken apart, globs replaced by the files they match.

    Raises:
        ValueError: a name, a path or a file's, behind which nothing stands.
    """
    names = [name] if isinstance(name, str) else list(name)
    found = []
    for one in itertools.chain.from_iterable(_split_list(given) for given in names):
        path = expanded(one)
        if path.exists():
            found.append(one)
        elif any(sign in one for sign in "*?["):
            files = sorted(glob(str(path), recursive=True))
            if not files:
                raise ValueError(f"expected a corpus at {one!r}, found no such file")
            found += files
        elif one.startswith((".", "/", "~")) or one.count("/") > 1 or has_known_suffix(one):
            raise ValueError(
                f"expected a corpus at {one!r}, found none: give 'stdlib', a hub id, a folder, or "
                f"a file of the kinds {', '.join(SUFFIXES)}"
            )
        else:
            found.append(one)
    return found


def _split_list(name: str) -> list[str]:
    """`a.jsonl,b.jsonl` and `a.jsonl b.jsonl` are two names, unless a file is called so."""
    if name.strip() and expanded(name).exists():
        return [name]
    names = [part for part in re.split(r"[,\s]+", name) if part]
    if not names:
        raise ValueError("expected the name of a corpus, got an empty one")
    return names


def _load_one(
    name: str,
    split: str,
    config: str | None,
    text_column: str | None,
    bad_rows: BadRows,
    streaming: bool,
) -> Corpus:
    splits = _HELD_OUT_NAMES if split == HELD_OUT else (split,)
    path = expanded(name)
    if name != "stdlib" and path.is_file():
        if not has_known_suffix(path.name):
            raise ValueError(
                f"expected a folder or a file of the kinds {', '.join(SUFFIXES)}, got {name!r}"
            )
        if split not in ("train", HELD_OUT):
            raise ValueError(f"{name!r} is a file, and files have no split {split!r}")
        return _from_files([path], name, text_column, bad_rows, streaming)
    if name == "stdlib":
        from medusa_heads.data.corpus import standard_library

        rows = standard_library("train" if split == "train" else "held_out")
    elif path.is_dir() and is_saved_dataset(path):
        rows = saved_dataset(path, splits)
    elif path.is_dir():
        files = files_of_split(path, splits)
        return _from_files(files, name, text_column, bad_rows, streaming)
    else:
        rows = load_hub_dataset(name, splits, config, streaming)
    corpus = as_corpus(rows, name, text_column=text_column, bad_rows=bad_rows)
    if streaming and corpus.counted:
        corpus.rows = corpus.rows.to_iterable_dataset()
    return corpus


def _from_files(
    files: Sequence[Path],
    name: str,
    text_column: str | None,
    bad_rows: BadRows,
    streaming: bool,
) -> Corpus:
    from datasets import Dataset, IterableDataset, concatenate_datasets

    found, columns = first_format(files, text_column)
    if not streaming and all(file.suffix == ".parquet" for file in files):
        tables = [_parquet_table(file) for file in files]
        corpus = as_corpus(
            concatenate_datasets(tables), name, text_column=text_column, bad_rows=bad_rows
        )
        named = (str(file) for file in files)
        corpus.counted = list(zip(named, map(len, tables), strict=True))
        return corpus
    features = table_features(columns)
    if streaming:
        # Tuples: a list would be taken for what several readers can share.
        arguments = {"files": tuple(files), "text_column": text_column, "bad_rows": bad_rows}
        rows = IterableDataset.from_generator(plain_rows, features=features, gen_kwargs=arguments)
    else:
        reading = plain_rows(files, text_column, bad_rows)
        tables = []
        while batch := list(itertools.islice(reading, _ROWS_AT_ONCE)):
            tables.append(Dataset.from_list(batch, features=features))
        if not tables:
            bad_rows.settle()
            raise ValueError(f"the corpus is empty: give one with text in it ({name})")
        rows = concatenate_datasets(tables)
    return Corpus(name, rows, recognise(columns), str(found), bad_rows)


def _parquet_table(file: Path) -> Dataset:
    """Memory-mapped by datasets, however large."""
    from datasets import Dataset
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowException

    try:
        table = Dataset.from_parquet(str(file))
        table.data.validate(full=True)  # its texts are texts, too
    except (DatasetsError, ArrowException, OSError, ValueError) as error:
        reason = error.__cause__ or error
        raise ValueError(f"{str(file)!r} is not valid Parquet ({reason})") from error
    return table


def _join(parts: Sequence[Corpus]) -> Corpus:
    from datasets import concatenate_datasets

    wanted = [*parts[0].format.columns, "tools", CONTEXT_COLUMN, PLACE_COLUMN]
    tables = []
    for number, part in enumerate(parts):
        names = part.rows.column_names  # of a stream they may be unknown, and all are kept
        known = None if names is None else [name for name in wanted if name in names]
        table = part.rows if known is None else part.rows.select_columns(known)
        if not part.is_stream and part.format.name == "tokens" and DOCUMENT_COLUMN in names:
            # Two corpora may number their documents alike.
            named = [None if d is None else f"{number} {d}" for d in part.rows[DOCUMENT_COLUMN]]
            table = table.add_column(DOCUMENT_COLUMN, named)
        tables.append(table)
    return Corpus(
        ", ".join(part.name for part in parts),
        concatenate_datasets(tables),
        parts[0].format,
        parts[0].found_as,
        parts[0].bad_rows,
        [entry for part in parts for entry in part.counted],
    )
