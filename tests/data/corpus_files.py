"""Small corpora on disk, in every kind of file, and what is read of them."""

import gzip
import json
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

from medusa_heads.data.sources import Corpus

TEXTS = ["a b", "c"]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


def contents(corpus: Corpus) -> list[Any]:
    return [corpus.format.read(row) for row in corpus.rows]


def as_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_jsonl(path: Path) -> None:
    path.write_text(as_lines([{"text": text, "id": 7} for text in TEXTS]))


def write_gzipped(path: Path) -> None:
    path.write_bytes(gzip.compress(as_lines([{"text": text} for text in TEXTS]).encode()))


def write_array(path: Path) -> None:
    path.write_text(json.dumps([{"text": text} for text in TEXTS], indent=2))


def write_csv(path: Path) -> None:
    path.write_text('\ufeffid,text\n1,a b\n2,"c"\n', encoding="utf-8")


def write_parquet(path: Path) -> None:
    Dataset.from_list([{"text": text} for text in TEXTS]).to_parquet(path)


def write_saved(path: Path) -> None:
    Dataset.from_list([{"text": text} for text in TEXTS]).save_to_disk(path)


def write_saved_splits(path: Path) -> None:
    rows = Dataset.from_list([{"text": text} for text in TEXTS])
    DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(path)


def write_folder(path: Path) -> None:
    (path / "data").mkdir(parents=True)
    (path / "README.md").write_text("not a corpus")
    (path / "data" / "train-00000.jsonl").write_text(as_lines([{"text": "a b"}]))
    (path / "data" / "train-00001.jsonl").write_text(as_lines([{"text": "c"}]))
    (path / "data" / "test-00000.jsonl").write_text(as_lines([{"text": "held"}]))
