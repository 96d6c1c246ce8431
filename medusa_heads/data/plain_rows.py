"""Rows of whatever form in columns of plain types, which are the same wherever rows are from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value

from medusa_heads.data.bad_rows import BadRow, BadRows
from medusa_heads.data.data_files import Refuse, read_rows
from medusa_heads.data.formats import CONTEXT_COLUMN, Format, plain_columns, recognise
from medusa_heads.data.images import IMAGES_COLUMN, stored_images
from medusa_heads.files import half_character

PLACE_COLUMN = "_place"
"""Where a row stands, `file:line`, for messages about it."""

PROBLEM_COLUMN = "_problem"
"""Why a row cannot be used."""


def plain_features(columns: Collection[str]) -> Features:
    """Types of plain columns, and of the column of places."""
    kinds: dict[str, Any] = dict.fromkeys([*columns, PLACE_COLUMN], Value("string"))
    for name in kinds.keys() & {"input_ids", "labels"}:
        kinds[name] = List(Value("int32"))
    if IMAGES_COLUMN in kinds:
        kinds[IMAGES_COLUMN] = stored_images()
    if CONTEXT_COLUMN in kinds:
        kinds[CONTEXT_COLUMN] = Value("int64")
    return Features(kinds)


def first_columns(rows: Iterable[Any], found: Format) -> Features | None:
    """Of the first row of a table that can be used."""
    for row in rows:
        with suppress(BadRow):
            return plain_features(plain_columns(found.read(row)))
    return None


def told_rows(
    make: Callable[..., Iterator[dict[str, Any]]], reading: dict[str, Any], hangs_on: object
) -> Iterator[dict[str, Any]]:
    """What `make` makes, and then the rows that cannot be used, with the reason why."""
    refused: list[tuple[str, str]] = []
    for row in make(**reading, refuse=lambda *told: refused.append(told)):
        yield {**row, PROBLEM_COLUMN: None}
    for place, problem in refused:
        nothing: dict[str, Any] = dict.fromkeys(reading["columns"])
        yield {**nothing, PLACE_COLUMN: place, PROBLEM_COLUMN: problem}


def first_format(
    files: Sequence[Path], text_column: str | None, known: Sequence[Format]
) -> tuple[Format, Features]:
    """The format of the first row that can be used, and the columns of all rows that are read."""
    broken = BadRows("skip")
    problem = "give one with text in it"
    for file in files:
        for place, row in read_rows(file, broken.add):
            found = _in_folder(recognise(list(row), text_column, known), file)
            try:
                columns = plain_columns(found.read(row, filled=file.suffix == ".parquet"))
            except BadRow as error:
                broken.add(place, str(error))
                continue
            return found, plain_features(columns)
    if broken.examples:
        problem = broken.named
    elif files:
        problem += f", {str(files[0])!r} has none"
    raise ValueError(f"the corpus is empty or has no row that can be used ({problem})")


def plain_rows(
    files: Sequence[Path], found: Format, columns: Sequence[str], refuse: Refuse
) -> Iterator[dict[str, Any]]:
    """The rows of data files in one format, with their places. Of broken rows `refuse` is told."""
    for file in files:
        rows, filled = read_rows(file, refuse), file.suffix == ".parquet"
        yield from _plain(rows, _in_folder(found, file), columns, refuse, filled=filled)


def _in_folder(found: Format, file: Path) -> Format:
    return replace(found, folder=str(file.absolute().parent))


def plain_rows_of(
    table: Dataset,
    counted: Sequence[tuple[str, int]],
    found: Format,
    columns: Sequence[str],
    refuse: Refuse,
) -> Iterator[dict[str, Any]]:
    """The same of a table that was joined of such parts: a row's place is its number in its own."""
    places = (f"{name} row {number + 1}" for name, count in counted for number in range(count))
    rows = zip(places, table, strict=True)
    yield from _plain(rows, found, columns, refuse, filled=True)


def _plain(
    rows: Iterable[tuple[str, Any]],
    found: Format,
    columns: Sequence[str],
    refuse: Refuse,
    *,
    filled: bool,
) -> Iterator[dict[str, Any]]:
    for place, row in rows:
        try:
            plain = plain_columns(found.read(row, filled=filled))
            _check_encodable(plain)
            if {*plain, PLACE_COLUMN} != set(columns):
                raise BadRow("it is of another kind than the rows before it")
        except BadRow as problem:
            refuse(place, str(problem))
        else:
            yield {**plain, PLACE_COLUMN: place}


def _check_encodable(plain: dict[str, Any]) -> None:
    """JSON can spell halves of characters outside the basic plane, of which no text consists."""
    for column, value in plain.items():
        if isinstance(value, str) and (place := half_character(value)) is not None:
            raise BadRow(f"{column!r} holds half a character ({value[place]!r}, a surrogate)")
