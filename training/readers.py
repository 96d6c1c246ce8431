"""Data files, read row by row with the place where each row stands."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from medusa_heads.training.bad_rows import BadRow, BadRows
from medusa_heads.training.formats import CONTEXT_COLUMN, Format, plain_columns, recognise

if TYPE_CHECKING:
    from datasets import Features

PLACE_COLUMN = "_place"
"""Where a row stands, `file:line`, for messages about it."""

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".jsonl.gz", ".json.gz", ".csv.gz")

# A field of a table is refused beyond 128 KB by default; a document may well be longer.
csv.field_size_limit(1 << 30)


def has_known_suffix(name: str) -> bool:
    """Whether a file of this name can be read here."""
    return name.endswith(SUFFIXES)


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
        for place, row in _read(file, bad_rows):
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
    problem = "give one with text in it"
    for file in files:
        for place, row in _read(file, BadRows("skip")):
            found = recognise(list(row), text_column)
            try:
                return found, [*plain_columns(found.read(row)), PLACE_COLUMN]
            except BadRow as error:
                problem = f"{place}: {error}"
    raise ValueError(f"the corpus is empty or has no row that can be used ({problem})")


def table_features(columns: Sequence[str]) -> Features:
    """Types of the columns that `plain_rows` yields."""
    from datasets import Features, List, Value

    known = {name: List(Value("int32")) for name in ("input_ids", "labels")}
    known[CONTEXT_COLUMN] = Value("int64")
    return Features({name: known.get(name, Value("string")) for name in columns})


def _read(file: Path, bad_rows: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    if not file.stat().st_size:
        raise ValueError(f"the corpus {str(file)!r} is empty: give one with text in it")
    name = file.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        return _read_parquet(file)
    if name.endswith(".csv"):
        return _read_csv(file, bad_rows)
    if name.endswith(".txt"):
        return _read_text(file)
    if name.endswith(".json") and _begins_with_bracket(file):
        return _read_json_array(file, bad_rows)
    return _read_json_lines(file, bad_rows)


@contextmanager
def _open(file: Path) -> Iterator[IO[bytes]]:
    if file.suffix != ".gz":
        with file.open("rb") as content:
            yield content
        return
    try:
        with gzip.open(file) as unpacked:
            yield unpacked  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{str(file)!r} is no whole gzip file ({error}): download or pack it anew"
        ) from error


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", text, 0) from error


def _read_json_lines(file: Path, bad_rows: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue  # a blank line is no row
            place = f"{file}:{number}"
            try:
                row = _parse_json(line.strip().decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                bad_rows.add(place, "not UTF-8")
            except json.JSONDecodeError as error:
                bad_rows.add(place, f"not valid JSON ({error.msg} at column {error.colno})")
            else:
                if isinstance(row, dict):
                    yield place, row
                else:
                    bad_rows.add(place, f"a JSON {type(row).__name__}, expected an object")


def _begins_with_bracket(file: Path) -> bool:
    with _open(file) as lines:
        return lines.read(256).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _read_json_array(file: Path, bad_rows: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    with _open(file) as content:
        try:
            rows = _parse_json(content.read().decode("utf-8-sig"))
        except ValueError as error:  # of JSON, or of UTF-8
            raise ValueError(f"{str(file)!r} is not valid JSON ({error})") from error
    for number, row in enumerate(rows, start=1):
        place = f"{file} row {number}"
        if isinstance(row, dict):
            yield place, row
        else:
            bad_rows.add(place, f"a JSON {type(row).__name__}, expected an object")


def _read_csv(file: Path, bad_rows: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    # Not through a table library: those take texts such as "NA" or "7" for something else.
    with _open(file) as content:
        try:
            # Before the quotes are looked at: a mark of the byte order would hide the first one.
            first = content.readline().decode("utf-8-sig")
            lines = itertools.chain([first], (line.decode("utf-8") for line in content))
            reader = csv.reader(lines)
            header = next(reader, [])
            if twice := sorted({name for name in header if header.count(name) > 1}):
                raise ValueError(f"{str(file)!r} has two columns of one name: {twice}")
            before = reader.line_num
            for fields in reader:
                place, before = f"{file}:{before + 1}", reader.line_num
                if len(fields) == len(header):
                    yield place, dict(zip(header, fields, strict=True))
                elif fields:  # a blank line is no row
                    reason = f"fields: {len(fields)}, where the header has {len(header)}"
                    bad_rows.add(place, reason)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{str(file)!r} is not valid CSV ({error})") from error


def _read_text(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with _open(file) as content:
        try:
            text = content.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{str(file)!r} is not UTF-8 ({error})") from error
    # How a system ends its lines is no part of the text.
    yield str(file), {"text": text.replace("\r\n", "\n").replace("\r", "\n")}


def _read_parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{str(file)!r} is not valid Parquet ({error})") from error
    number = 0
    for batch in table.iter_batches(batch_size=256):
        for row in batch.to_pylist():
            number += 1
            yield f"{file} row {number}", row
