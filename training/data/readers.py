"""Data files of one format as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.data.bad_rows import BadRow, BadRows
from medusa_heads.data.data_files import read_rows
from medusa_heads.data.formats import CONTEXT_COLUMN, Format, plain_columns, recognise

if TYPE_CHECKING:
    from datasets import Features

PLACE_COLUMN = "_place"
"""Where a row stands, `file:line`, for messages about it."""


def plain_rows(
    files: Sequence[Path], text_column: str | None, bad_rows: BadRows
) -> Iterator[dict[str, Any]]:
    """The rows of data files in one format, that of the first row, with their places.

    Broken rows go to `bad_rows` and are not yielded.

    Raises:
        ValueError: a file cannot be read at all, or its columns are of no known format.
    """
    found: Format | None = None
    columns: set[str] = set()
    for file in files:
        for place, row in read_rows(file, bad_rows.add):
            try:
                found = found or recognise(list(row), text_column)
                plain = plain_columns(found.read(row))
                _check_encodable(plain)
                columns = columns or set(plain)
                if set(plain) != columns:
                    raise BadRow("it is of another kind than the rows before it")
            except BadRow as problem:
                bad_rows.add(place, str(problem))
            else:
                yield {**plain, PLACE_COLUMN: place}


def _check_encodable(plain: Mapping[str, Any]) -> None:
    """JSON can spell halves of characters outside the basic plane, of which no text consists."""
    for column, value in plain.items():
        try:
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start]
            raise BadRow(f"{column!r} holds half a character ({half!r}, a surrogate)") from error


def first_format(files: Sequence[Path], text_column: str | None) -> tuple[Format, list[str]]:
    """The format that `plain_rows` reads the files in, and the columns that it yields.

    Raises:
        ValueError: the files are empty, or of no known format.
    """
    broken = BadRows("skip")
    problem = "give one with text in it"
    for file in files:
        for place, row in read_rows(file, broken.add):
            found = recognise(list(row), text_column)
            try:
                return found, [*plain_columns(found.read(row)), PLACE_COLUMN]
            except BadRow as error:
                problem = f"{place}: {error}"
    if broken.examples:
        problem = broken.examples[0]
    elif files:
        problem += f", {str(files[0])!r} has none"
    raise ValueError(f"the corpus is empty or has no row that can be used ({problem})")


def table_features(columns: Sequence[str]) -> Features:
    """Types of the columns that `plain_rows` yields."""
    from datasets import Features, List, Value

    known = {name: List(Value("int32")) for name in ("input_ids", "labels")}
    known[CONTEXT_COLUMN] = Value("int64")
    return Features({name: known.get(name, Value("string")) for name in columns})
