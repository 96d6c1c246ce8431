"""Data files: every kind is read alike, and files that are damaged are refused by name."""

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pyarrow.parquet import ParquetFile

from medusa_heads.data.formats import Document
from medusa_heads.data.sources import load_corpus
from tests.data.corpus_files import (
    TEXTS,
    as_lines,
    contents,
    write_array,
    write_csv,
    write_folder,
    write_gzipped,
    write_jsonl,
    write_parquet,
    write_saved,
    write_saved_splits,
)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_jsonl),
        ("a.jsonl.gz", write_gzipped),
        ("a.json", write_jsonl),
        ("array.json", write_array),
        ("a.csv", write_csv),
        ("a.parquet", write_parquet),
        ("saved", write_saved),
        ("splits", write_saved_splits),
        ("folder", write_folder),
    ],
)
def test_plain_text_is_read_from_all_kinds_of_files(
    name: str, write: Callable[[Path], Any], streaming: bool, tmp_path: Path
) -> None:
    write(tmp_path / name)
    corpus = load_corpus(str(tmp_path / name), streaming=streaming)
    assert corpus.is_stream == streaming and corpus.found_as == "text"
    assert contents(corpus) == [Document(text) for text in TEXTS]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa b\r\n\nc")
    assert contents(load_corpus(str(tmp_path / "a.txt"))) == [Document("a b\n\nc")]


def test_fields_of_a_table_stay_texts(tmp_path: Path) -> None:
    """Table libraries read NA and 7 as something else; a field may hold line breaks."""
    (tmp_path / "a.csv").write_text('text\nNA\n7\n"two\nlines"\n\n"x"\n')
    corpus = load_corpus(str(tmp_path / "a.csv"))
    assert [row["text"] for row in corpus.rows] == ["NA", "7", "two\nlines", "x"]
    assert [row["_place"].rsplit(":", 1)[1] for row in corpus.rows] == ["2", "3", "4", "7"]


def test_quotes_in_fields_are_read_as_ever(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,id\na "b" c,1\n"a ""b"" c",2\nit"s,"3"\n "d" ,4\n"",5')
    corpus = load_corpus(str(tmp_path / "a.csv"), on_bad_row="skip")
    assert [row["text"] for row in corpus.rows] == ['a "b" c', 'a "b" c', 'it"s', ' "d" ']


def test_a_mark_of_the_byte_order_is_no_part_of_a_quoted_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbf"text","id"\r\n"a b","1"\r\n')
    assert contents(load_corpus(str(tmp_path / "a.csv"))) == [Document("a b")]


GZIPPED = gzip.compress(as_lines([{"text": str(i)} for i in range(99)]).encode())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "expected a corpus at .*missing.jsonl.*, found none"),
        ("missing/folder", None, "found none: give 'stdlib', a hub id, a folder"),
        ("*.jsonl", None, "found no such file"),
        ("empty.txt", b"", "is empty"),
        ("empty.csv", b"text\n", "is empty or has no row that can be used .*empty.csv"),
        ("wide.json", '{"text": "a"}'.encode("utf-16"), "wide.json:1: not UTF-8"),
        ("long.json", b"[" + b"9" * 5_000, "long.json' is not valid JSON .a number is too long"),
        ("model.bin", b"a", "expected a folder or a file of the kinds .jsonl,"),
        ("table.csv", b"a,b\n1,2", r"got \['a', 'b'\]"),
        ("bad.csv", b"text\n\xff\n", "not valid CSV"),
        ("open.csv", b'text\na\n"b\nc\nd\n', "open.csv' is not valid CSV .* begins in line 3 "),
        ("pairs.csv", b'text\n"a\nb\n"c"\nd\n', "pairs.csv' is not valid CSV .* in line 2 "),
        ("header.csv", b'"text\na\n', "header.csv' is not valid CSV .* begins in line 1 "),
        ("bad.txt", b"\xff", "not UTF-8"),
        ("bad.parquet", b"PAR1", "not valid Parquet"),
        ("bad.json", b"[1, ", "not valid JSON"),
        ("deep.json", b"[" * 100_000, "not valid JSON"),
        ("twice.csv", b"text,text\na,b\n", r"two columns of one name: \['text'\]"),
        ("cut.jsonl.gz", GZIPPED[:-20], "cut.jsonl.gz' is no whole gzip file"),
        ("bad.csv.gz", GZIPPED[:30] + b"?" + GZIPPED[31:], "bad.csv.gz' is no whole gzip file"),
        ("plain.json.gz", b"[]", "plain.json.gz' is no whole gzip file"),
    ],
)
def test_files_that_are_no_corpus(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(str(tmp_path / name))


@pytest.mark.parametrize("name", ["dataset_info.json", "dataset_dict.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "5", '{"splits": 5}', '{"splits": [5]}'])
def test_a_folder_that_only_looks_saved(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        load_corpus(str(tmp_path))


@pytest.mark.parametrize("damage", ["page", "text"])
def test_a_table_that_is_damaged_behind_its_first_rows(damage: str, tmp_path: Path) -> None:
    path, table = tmp_path / "a.parquet", pyarrow.table({"text": [str(i) for i in range(1000)]})
    if damage == "text":
        texts = pyarrow.array([b"a"] * 999 + [b"\xff"]).cast("string", safe=False)
        table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=500, use_dictionary=False)
    if damage == "page":
        data = bytearray(path.read_bytes())
        start = ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
        data[start : start + 24] = bytes(24)
        path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.parquet' is not valid Parquet"):
        load_corpus(str(path))
