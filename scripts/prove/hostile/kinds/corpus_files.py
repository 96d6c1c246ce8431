"""What stands in the place of a file of rows."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.prove.hostile.kinds.corpus_rows import STEM, Row, good_row, write
from scripts.prove.hostile.values import deep, many_digits, words
from scripts.prove.hostile.workshop import Place

Write = Callable[[Path, random.Random, Place], Any]


def _sub(folder: Path, name: str, data: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return str(folder)


def _torn(path: Path, rows: list[Row], cut: int) -> None:
    write(path, rows)
    path.write_bytes(path.read_bytes()[:-cut])


def _with_fifo(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "a.jsonl")


def _text_rows(rng: random.Random, count: int = 4) -> list[Row]:
    return [good_row(rng, "text") for _ in range(count)]


def _parquet(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _late_damage(path: Path, rng: random.Random) -> None:
    """The first rows can be read, some group behind them cannot."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(_text_rows(rng, 40))
    pyarrow.parquet.write_table(table, path, row_group_size=10, compression="snappy")
    data, start = bytearray(path.read_bytes()), 0
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(rng.randrange(1, 4))
    column = group.column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    for place in range(start, start + 24):
        data[place] ^= 0xFF
    path.write_bytes(data)


# What stands in a file's place: suffix, and what writes it. Each is refused, whatever the policy.
FILES: dict[str, tuple[str, Write]] = {
    "empty": (".jsonl", lambda path, rng, place: path.write_bytes(b"")),
    "empty parquet": (".parquet", lambda path, rng, place: path.write_bytes(b"")),
    "white space": (".jsonl", lambda path, rng, place: path.write_bytes(b" \n\t\n" * 3)),
    "no rows": (".json", lambda path, rng, place: path.write_bytes(b"[]")),
    "a header alone": (".csv", lambda path, rng, place: path.write_bytes(b"text,other\n")),
    "no parquet": (".parquet", lambda path, rng, place: path.write_bytes(rng.randbytes(400))),
    "a torn parquet": (
        ".parquet",
        lambda path, rng, place: _torn(path, _text_rows(rng), rng.randint(1, 200)),
    ),
    "a parquet damaged further on": (".parquet", lambda path, rng, place: _late_damage(path, rng)),
    "a parquet of numbers": (
        ".parquet",
        lambda path, rng, place: _parquet(path, {"text": [rng.randrange(99) for _ in range(5)]}),
    ),
    "a parquet of lists": (
        ".parquet",
        lambda path, rng, place: _parquet(path, {"text": [[words(rng)], [words(rng)]]}),
    ),
    "a parquet of other columns": (
        ".parquet",
        lambda path, rng, place: _parquet(path, {words(rng): ["a", "b", "c"]}),
    ),
    "a parquet without rows": (".parquet", lambda path, rng, place: _parquet(path, {"text": []})),
    "no gzip": (".jsonl.gz", lambda path, rng, place: path.write_bytes(rng.randbytes(99))),
    "a torn gzip": (
        ".jsonl.gz",
        lambda path, rng, place: _torn(path, _text_rows(rng, 40), rng.randint(9, 60)),
    ),
    "a torn array": (
        ".json",
        lambda path, rng, place: path.write_text(
            json.dumps(_text_rows(rng))[: -rng.randint(1, 40)]
        ),
    ),
    "an array nested too deeply": (
        ".json",
        lambda path, rng, place: path.write_text(deep(rng.randint(3_000, 90_000))),
    ),
    "an array with a number too long": (
        ".json",
        lambda path, rng, place: path.write_text(f'[{{"text": {many_digits(rng)}}}]'),
    ),
    "utf-16": (
        ".json",
        lambda path, rng, place: path.write_text(json.dumps(_text_rows(rng)), encoding="utf-16"),
    ),
    "utf-16 text": (".txt", lambda path, rng, place: path.write_text(words(rng), "utf-16")),
    "latin-1 text": (".txt", lambda path, rng, place: path.write_bytes(b"na\xefve " * 9)),
    "a csv with NULs": (
        ".csv",
        lambda path, rng, place: path.write_bytes(b"text\n" + b"a\xff\0b\n" * rng.randint(1, 5)),
    ),
    "a csv with two columns of one name": (
        ".csv",
        lambda path, rng, place: path.write_text(f"text,text\n{words(rng)},b\n"),
    ),
    "a csv of other columns": (
        ".csv",
        lambda path, rng, place: path.write_text(f"{words(rng, 1, 2)},b\n1,2\n3,4\n"),
    ),
    "a FIFO": (".jsonl", lambda path, rng, place: os.mkfifo(path)),
    "a link to nothing": (".jsonl", lambda path, rng, place: path.symlink_to(path.parent / "none")),
    "a link to itself": (".jsonl", lambda path, rng, place: path.symlink_to(path)),
    "a folder": (".jsonl", lambda path, rng, place: path.mkdir()),
    "a folder of other files": (
        "",
        lambda path, rng, place: _sub(path, f"{words(rng, 1, 1)}.py", b"open('ran', 'w')"),
    ),
    "a folder with a loading script": (
        "",
        lambda path, rng, place: _sub(
            path, f"{STEM}.py", f"open({str(place.marker)!r}, 'w').close()".encode()
        ),
    ),
    "a folder with a FIFO": ("", lambda path, rng, place: _with_fifo(path)),
    "a saved dataset that is none": (
        "",
        lambda path, rng, place: _sub(
            path, "dataset_info.json", rng.choice([b"{}", b"[]", b"{", b"null", rng.randbytes(9)])
        ),
    ),
    "splits that are none": (
        "",
        lambda path, rng, place: _sub(
            path,
            "dataset_dict.json",
            rng.choice([b"{}", b"[]", b"{", b'{"splits": 5}', b'{"splits": ["../x"]}', b"\xff"]),
        ),
    ),
    "another kind of file": (".exe", lambda path, rng, place: path.write_bytes(rng.randbytes(99))),
    "a pickle": (".pkl", lambda path, rng, place: path.write_bytes(b"cos\nsystem\n(S'x'\ntR.")),
    "no file": (".jsonl", lambda path, rng, place: None),
    "a glob without files": ("/*.jsonl", lambda path, rng, place: None),
    "a glob of brackets": ("[!a-/*.json", lambda path, rng, place: None),
    "a NUL in the name": ("\0.jsonl", lambda path, rng, place: None),
    "a name beyond what a system takes": ("x" * 300 + ".jsonl", lambda path, rng, place: None),
    "half a character in the name": ("\udcff.jsonl", lambda path, rng, place: None),
    "a name that leads out": ("/../../none.jsonl", lambda path, rng, place: None),
}
