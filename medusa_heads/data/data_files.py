"""Data files of all kinds, read row by row with the place where each row stands.

Not through the readers of `datasets`: these give all rows of a file one type, take texts such as
"NA" or "7" in tables for something else, and do not say in which line a row stands.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from medusa_heads.files import parse_json

if TYPE_CHECKING:
    from datasets import Dataset

Refuse = Callable[[str, str], None]
Rows = Iterator[tuple[str, dict[str, Any]]]

_ROWS_OF_A_BATCH = 20_000  # of a table: each batch takes kilobytes of every process that reads it

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".jsonl.gz", ".json.gz", ".csv.gz")

# A field of a table is refused beyond 128 KB by default; a document may well be longer.
csv.field_size_limit(1 << 30)


def read_rows(file: Path, refuse: Refuse) -> Rows:
    """The rows of a file, each with its place, `file:line`; a text file is one, with a column
    `text`. A row that cannot be read is left out, and `refuse` is told its place and why. Raises
    ValueError: the file cannot be read at all."""
    if not file.stat().st_size:
        refuse(str(file), "an empty file")
        return iter(())
    name = file.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        return _read_parquet(file)
    if name.endswith(".csv"):
        return _read_csv(file, refuse)
    if name.endswith(".txt"):
        return _read_text(file)
    return _read_json(file, refuse)


@contextmanager
def _open(file: Path) -> Iterator[IO[bytes]]:
    opened: Any = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rb") as content:
            yield content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{str(file)!r} is no whole gzip file ({error}): download or pack it anew"
        ) from error


def _read_json(file: Path, refuse: Refuse) -> Rows:
    is_array = False
    if file.name.removesuffix(".gz").endswith(".json"):
        with _open(file) as content:
            is_array = content.read(256).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    for place, row in _array(file) if is_array else _lines(file, refuse):
        if isinstance(row, dict):
            yield place, row
        else:
            refuse(place, f"a JSON {type(row).__name__}, expected an object")


def _array(file: Path) -> Iterator[tuple[str, Any]]:
    with _open(file) as content:
        try:
            rows = parse_json(content.read().decode("utf-8-sig"))
        except ValueError as error:  # of JSON, or of UTF-8
            raise ValueError(f"{str(file)!r} is not valid JSON ({error})") from error
    for number, row in enumerate(rows, start=1):
        yield f"{file} row {number}", row


def _lines(file: Path, refuse: Refuse) -> Iterator[tuple[str, Any]]:
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue  # a blank line is no row
            place = f"{file}:{number}"
            try:
                row = parse_json(line.strip().decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                refuse(place, "not UTF-8")
            except json.JSONDecodeError as error:
                refuse(place, f"not valid JSON ({error.msg} at column {error.colno})")
            else:
                yield place, row


def _read_csv(file: Path, refuse: Refuse) -> Rows:
    before = 0  # lines that are read
    with _open(file) as content:
        try:
            # Before the quotes are looked at: a mark of the byte order would hide the first one.
            first = content.readline().decode("utf-8-sig")
            lines = itertools.chain([first], (line.decode("utf-8") for line in content))
            # Else a quote that is not closed takes all lines up to the next one into its field.
            reader = csv.reader(lines, strict=True)
            header = next(reader, [])
            if twice := sorted({name for name in header if header.count(name) > 1}):
                raise ValueError(f"{str(file)!r} has two columns of one name: {twice}")
            before = reader.line_num
            for fields in reader:
                place, before = f"{file}:{before + 1}", reader.line_num
                if len(fields) == len(header):
                    yield place, dict(zip(header, fields, strict=True))
                elif fields:  # a blank line is no row
                    refuse(place, f"fields: {len(fields)}, where the header has {len(header)}")
        except csv.Error as error:
            raise ValueError(
                f"{str(file)!r} is not valid CSV in the row that begins in line {before + 1} "
                f"({error}): look for a quote that is not closed, or not doubled within a field"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{str(file)!r} is not valid CSV ({error})") from error


def _read_text(file: Path) -> Rows:
    try:
        # However the system ends its lines: that is no part of the text.
        yield str(file), {"text": file.read_text(encoding="utf-8-sig")}
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8 ({error})") from error


def _read_parquet(file: Path) -> Rows:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        batches = ParquetFile(file).iter_batches(batch_size=256)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield f"{file} row {number}", row
    # What a damaged page holds may be of any type, or beyond what Python has.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{str(file)!r} is not valid Parquet ({error})") from error


def parquet_table(file: Path) -> Dataset:
    """All of a file as a table, memory-mapped by datasets, however large."""
    from datasets import Dataset
    from datasets.exceptions import DatasetsError
    from datasets.packaged_modules.parquet.parquet import ParquetConfig
    from pyarrow import ArrowException, default_memory_pool
    from pyarrow.dataset import ParquetFragmentScanOptions

    # Else as much memory as the file is large holds what was read ahead, until it ends.
    options = {"fragment_scan_options": ParquetFragmentScanOptions(pre_buffer=False)}
    if not options.keys() <= {each.name for each in fields(ParquetConfig)}:
        options = {}  # of earlier versions of datasets
    try:
        table = Dataset.from_parquet(str(file), writer_batch_size=_ROWS_OF_A_BATCH, **options)
        table.data.validate(full=True)  # its texts are texts, too
    except (DatasetsError, ArrowException, OSError, ValueError) as error:
        reason = error.__cause__ or error
        raise ValueError(f"{str(file)!r} is not valid Parquet ({reason})") from error
    default_memory_pool().release_unused()  # it would keep hundreds of megabytes
    return table
