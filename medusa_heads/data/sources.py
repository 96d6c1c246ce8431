"""Corpora as they are found, each row still in its own form."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import datasets
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets
from datasets.exceptions import DatasetGenerationError

from medusa_heads.data.bad_rows import BadRows
from medusa_heads.data.data_files import parquet_table
from medusa_heads.data.finding import find_names, find_rows
from medusa_heads.data.formats import (
    CONTEXT_COLUMN,
    DOCUMENT_COLUMN,
    FORMATS,
    MASK_COLUMN,
    Format,
    recognise,
)
from medusa_heads.data.images import IMAGES_COLUMN, may_hold_images, undecoded
from medusa_heads.data.messages import SYSTEM_COLUMN
from medusa_heads.data.plain_rows import (
    PLACE_COLUMN,
    PROBLEM_COLUMN,
    first_columns,
    first_format,
    plain_rows,
    plain_rows_of,
    told_rows,
)
from medusa_heads.files import check_folder, code_sha256, expanded

_BESIDE = (
    "tools", SYSTEM_COLUMN, IMAGES_COLUMN, DOCUMENT_COLUMN, MASK_COLUMN, CONTEXT_COLUMN,
    PLACE_COLUMN,
)  # fmt: skip
"""Columns that are read too, where they are there."""


@dataclass
class Corpus:
    """Text to learn from: a table, or a stream of rows."""

    name: str  # for messages
    rows: Dataset | IterableDataset  # of plain text, the column is `text`
    format: Format  # how a row is read
    found_as: str  # the columns in which the corpus came
    bad_rows: BadRows = field(default_factory=BadRows)  # so far, and what to do about others
    counted: list[tuple[str, int]] = field(default_factory=list)  # name and rows of parts
    cut_documents: int = 0  # of a tokenised table: how many were too long and lost labels
    cut_tokens: int = 0  # and how many labels

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


def is_stream(rows: Dataset | IterableDataset) -> bool:
    """Whether a dataset is read row by row, and is never all there."""
    return not isinstance(rows, Dataset)


def load_corpus(
    name: str | Sequence[str],
    split: str = "train",
    *,
    config: str | None = None,
    text_column: str | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    streaming: bool = False,
    exact: bool = False,
    known: Sequence[Format] = FORMATS,
) -> Corpus:
    """Find and read a corpus: `stdlib`, a hub id, a folder or a file; or several of those, globs
    among them, whose rows then are of one format. `split`, `config` and `exact` are those of
    `find_rows`, and a stream is read as it is used. It has one of the formats `known`. Raises
    ValueError: nothing stands there, or it cannot be read."""
    bad_rows = BadRows(on_bad_row, stream=streaming)
    parts = []
    for one in find_names(name):
        rows = find_rows(one, split, config, streaming=streaming, exact=exact)
        if isinstance(rows, list):
            parts.append(_from_files(rows, one, text_column, bad_rows, streaming, known))
            continue
        part = as_corpus(rows, one, text_column=text_column, bad_rows=bad_rows, known=known)
        parts.append(_lying_in(part, [expanded(one)]))
        if streaming and parts[-1].counted:
            parts[-1].rows = parts[-1].rows.to_iterable_dataset()
    bad_rows.settle()
    _check_alike(parts, "found_as")
    return parts[0] if len(parts) == 1 else _join(parts, bad_rows, known)


def _check_alike(parts: Sequence[Corpus], which: str) -> None:
    for corpus in parts:
        if getattr(corpus, which) != getattr(parts[0], which):
            raise ValueError(
                f"expected corpora of one format, but {parts[0].name!r} has "
                f"{getattr(parts[0], which)} and {corpus.name!r} has {getattr(corpus, which)}: "
                "bring them into one"
            )


def as_corpus(
    rows: Dataset | IterableDataset,
    name: str,
    *,
    text_column: str | None = None,
    bad_rows: BadRows | None = None,
    known: Sequence[Format] = FORMATS,
) -> Corpus:
    """A dataset in memory, or a stream, as a corpus; a ValueError where it is empty, or its columns
    are of no known format."""
    if isinstance(rows, dict):  # of splits
        raise ValueError(f"{name} has the splits {sorted(rows)}: give one of them")
    rows = rows.with_format(None) if is_stream(rows) else undecoded(rows.with_format(None))
    if is_stream(rows):
        columns, counted = list(next(iter(rows), {})), []
    else:
        columns, counted = (rows.column_names if len(rows) else []), [(name, len(rows))]
    if not columns:
        raise ValueError(f"the corpus is empty: give one with text in it ({name})")
    found = recognise(columns, text_column, known)
    found_as = str(found)
    if found.name == "text" and found.columns != ("text",):
        rows = rows.select_columns(list(found.columns)).rename_columns({found.columns[0]: "text"})
        found = recognise(["text"])
    return Corpus(name, rows, found, found_as, bad_rows or BadRows(), counted)


def _from_files(
    files: Sequence[Path],
    name: str,
    text_column: str | None,
    bad_rows: BadRows,
    streaming: bool,
    known: Sequence[Format],
) -> Corpus:
    found, features = first_format(files, text_column, known)
    tables = []
    if not streaming and all(file.suffix == ".parquet" for file in files):
        tables = [parquet_table(file) for file in files]
    if len(tables) > 1:
        tables = [_of_columns(table, (*found.columns, *_BESIDE)) for table in tables]
    if tables and _are_alike(tables):
        corpus = as_corpus(
            concatenate_datasets(tables),
            name,
            text_column=text_column,
            bad_rows=bad_rows,
            known=known,
        )
        named = (str(file) for file in files)
        corpus.counted = list(zip(named, map(len, tables), strict=True))
        return _lying_in(corpus, [file.parent for file in files])
    # Tuples: a list would be taken for what several readers can share.
    reading: dict[str, Any] = {"files": tuple(files), "found": found, "columns": tuple(features)}
    if streaming:
        reading["refuse"] = bad_rows.add
        rows = IterableDataset.from_generator(plain_rows, features=features, gen_kwargs=reading)
    else:
        rows = _read_once(reading, features, bad_rows)
        if not len(rows):
            bad_rows.settle()
            raise ValueError(f"the corpus is empty: give one with text in it ({name})")
    return Corpus(name, rows, recognise(list(features), known=known), str(found), bad_rows)


def _lying_in(corpus: Corpus, folders: Sequence[Path]) -> Corpus:
    """The same, with relative paths of its images in a folder, where it lies in one."""
    folder = str(folders[0].absolute())
    if corpus.is_stream or len({*folders}) > 1 or not os.path.isdir(folder):
        return corpus
    if may_hold_images(corpus.rows, corpus.format.columns):
        corpus.format = replace(corpus.format, folder=folder)
    return corpus


def _read_once(reading: dict[str, Any], features: Features, bad_rows: BadRows) -> Dataset:
    """The rows of files as they were read before, in the cache of `datasets`, or are read now by
    the first process that asks; those that cannot be used go to `bad_rows`. ValueError where the
    cache cannot be written."""
    stats = [file.stat() for file in reading["files"]]
    versions = tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)
    files = tuple(file.absolute() for file in reading["files"])
    return _made_once(plain_rows, reading, (versions, files), features, bad_rows)


def _made_once(
    make: Callable[..., Any],
    reading: dict[str, Any],
    hangs_on: object,
    features: Features,
    bad_rows: BadRows,
) -> Dataset:
    check_folder(datasets.config.HF_DATASETS_CACHE, chosen_by="HF_DATASETS_CACHE")
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # they would stand before the one sentence of what is refused
    code = code_sha256(Path(__file__).parent)
    try:
        rows = Dataset.from_generator(
            told_rows,
            features=Features({**features, PROBLEM_COLUMN: Value("string")}),
            gen_kwargs={"make": make, "reading": reading, "hangs_on": (hangs_on, code)},
        )
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    finally:
        if shown:
            datasets.enable_progress_bars()
    good = rows.data.column(PROBLEM_COLUMN).null_count  # these come first
    if good < len(rows):
        for row in rows.select(range(good, len(rows))):
            bad_rows.add(row[PLACE_COLUMN], row[PROBLEM_COLUMN])
        rows = rows.select(range(good))
    return rows.remove_columns(PROBLEM_COLUMN)


def _are_alike(tables: Sequence[Any]) -> bool:
    """Whether tables have the same types in the columns that rows are read from."""
    kinds: dict[str, Any] = {}
    columns = (pair for table in tables for pair in table.features.items())
    return all(kinds.setdefault(*pair) == pair[1] for pair in columns if pair[1] != Value("null"))


def _plain(part: Corpus, bad_rows: BadRows, known: Sequence[Format]) -> Corpus:
    """A table with columns as those of files that are read row by row."""
    assert isinstance(part.rows, Dataset)
    if PLACE_COLUMN in part.rows.column_names:
        return part
    table = _of_columns(part.rows, (*part.format.columns, *_BESIDE))
    features = first_columns(table, part.format)
    if features is None:
        raise ValueError(f"the corpus is empty or has no row that can be used ({part.name})")
    reading = {"table": table, "counted": tuple(part.counted), "found": part.format}
    reading["columns"] = tuple(features)
    rows = _made_once(plain_rows_of, reading, None, features, bad_rows)
    return replace(part, rows=rows, format=recognise(rows.column_names, known=known))


def _of_columns(rows: Any, wanted: Sequence[str]) -> Any:
    return rows.select_columns([name for name in rows.column_names if name in wanted])


def _join(parts: Sequence[Corpus], bad_rows: BadRows, known: Sequence[Format]) -> Corpus:
    tables = [_to_join(*each) for each in enumerate(parts)]
    one_format = all(part.format == parts[0].format for part in parts)
    if not parts[0].is_stream and not (one_format and _are_alike(tables)):
        parts = [_plain(part, bad_rows, known) for part in parts]
        bad_rows.settle()
        tables = [_to_join(*each) for each in enumerate(parts)]
    _check_alike(parts, "format")
    return replace(
        parts[0],
        name=", ".join(part.name for part in parts),
        rows=concatenate_datasets(tables),
        counted=[entry for part in parts for entry in _counted(part)],
    )


def _counted(part: Corpus) -> list[tuple[str, int]]:
    rows = part.rows
    return part.counted or ([(part.name, len(rows))] if isinstance(rows, Dataset) else [])


def _to_join(number: int, part: Corpus) -> Any:
    """The columns that are read of the part of this number."""
    names = part.rows.column_names  # of a stream they may be unknown, and all are kept
    if names is None:
        return part.rows
    table = _of_columns(part.rows, (*part.format.columns, *_BESIDE))
    if not part.is_stream and part.format.name == "tokens" and DOCUMENT_COLUMN in names:
        # Two corpora may number their documents alike.
        named = [None if d is None else f"{number} {d}" for d in part.rows[DOCUMENT_COLUMN]]
        table = table.remove_columns(DOCUMENT_COLUMN).add_column(DOCUMENT_COLUMN, named)
    return table
