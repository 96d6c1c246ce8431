"""Tables of one format are joined, whatever types their columns were written in."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from medusa_heads.data.formats import Conversation, Document
from medusa_heads.data.sources import load_corpus
from tests.data.corpus_files import contents

ASKED = {"role": "user", "content": "Hi"}
TALKS: list[list[dict[str, Any]]] = [
    [ASKED, {"role": "assistant", "content": "Hello"}],
    [ASKED, {"role": "assistant", "content": "Hello", "weight": 1}],
    [ASKED, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
]
CONVERSATIONS = [Conversation(talk) for talk in TALKS]


def parquet(path: Path, talk: Any) -> None:
    Dataset.from_list([{"messages": talk, "id": path.stem}]).to_parquet(str(path))


def saved(path: Path, talk: Any) -> None:
    Dataset.from_list([{"messages": talk, "id": 7}]).save_to_disk(str(path))


def lines(path: Path, talk: Any) -> None:
    path.write_text(json.dumps({"messages": talk}) + "\n")


Write = Callable[[Path, Any], None]


def test_shards_in_a_folder_have_types_of_their_own(tmp_path: Path) -> None:
    for number, talk in enumerate(TALKS):
        parquet(tmp_path / f"{number}.parquet", talk)
    assert contents(load_corpus(str(tmp_path))) == CONVERSATIONS
    assert contents(load_corpus(f"{tmp_path}/*.parquet")) == CONVERSATIONS


@pytest.mark.parametrize(
    "kinds", [(parquet, lines), (lines, parquet), (saved, lines), (saved, parquet), (saved, saved)]
)
def test_kinds_of_files_are_joined(kinds: tuple[Write, Write], tmp_path: Path) -> None:
    suffixes: dict[Write, str] = {parquet: ".parquet", lines: ".jsonl", saved: ""}
    names = [tmp_path / f"{n}{suffixes[write]}" for n, write in enumerate(kinds)]
    for write, path, talk in zip(kinds, names, TALKS, strict=False):
        write(path, talk)
    before = sorted(tmp_path.rglob("*"))
    assert contents(load_corpus([str(path) for path in names])) == CONVERSATIONS[:2]
    assert sorted(tmp_path.rglob("*")) == before


def test_columns_that_nobody_reads_may_differ(tmp_path: Path) -> None:
    for name, column in {"a": pa.array([1]), "b": pa.array(["x"])}.items():
        pq.write_table(pa.table({"text": [name], "meta": column}), tmp_path / f"{name}.parquet")
    large = pa.table({"text": pa.array(["c"], pa.large_string())})
    pq.write_table(large, tmp_path / "c.parquet")
    documents = [Document(text) for text in "abc"]
    assert contents(load_corpus(str(tmp_path))) == documents
    assert contents(load_corpus(f"{tmp_path}/*.parquet")) == documents


@pytest.mark.parametrize("streaming", [False, True])
def test_messages_may_say_when_they_were_written(streaming: bool, tmp_path: Path) -> None:
    """Or hold whatever else a table can and JSON cannot."""
    times = [datetime(2026, 1, day, 12, 30) for day in (1, 2)]
    talk = [{**said, "at": at} for said, at in zip(TALKS[0], times, strict=True)]
    parquet(tmp_path / "a.parquet", talk)
    [found] = contents(load_corpus(str(tmp_path / "a.parquet"), streaming=streaming))
    assert [said["content"] for said in found.messages] == ["Hi", "Hello"]
    assert str(found.messages[0]["at"]) == "2026-01-01 12:30:00"


def test_a_broken_row_is_named_by_its_own_file(tmp_path: Path) -> None:
    wrong = [ASKED, {"role": "bot", "content": "Hello", "weight": 1}]
    parquet(tmp_path / "a.parquet", TALKS[0])
    Dataset.from_list([{"messages": TALKS[1]}, {"messages": wrong}]).to_parquet(
        str(tmp_path / "b.parquet")
    )
    with pytest.raises(ValueError, match=r"1 broken row \(\S*b.parquet row 2: message 1"):
        load_corpus(f"{tmp_path}/*.parquet")


def test_what_is_learnt_of_texts_and_of_messages_is_not_joined(tmp_path: Path) -> None:
    answer = {"prompt": TALKS[0][:1], "completion": TALKS[0][1:]}
    Dataset.from_list([answer]).to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "b.jsonl").write_text(json.dumps(answer) + "\n")
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "x", "completion": "y"}) + "\n")
    joined = contents(load_corpus([f"{tmp_path}/a.parquet", f"{tmp_path}/b.jsonl"]))
    assert joined == [Conversation(TALKS[0], context=1)] * 2
    with pytest.raises(ValueError, match=r"a.parquet' has messages and .*has prompt \+ completion"):
        load_corpus([f"{tmp_path}/a.parquet", f"{tmp_path}/c.jsonl"])


def test_rows_of_tables_are_named_behind_those_that_name_themselves(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 3)
    Dataset.from_list([{"text": "y"}]).to_parquet(str(tmp_path / "b.parquet"))
    corpus = load_corpus([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.parquet"])
    assert corpus.place(3) == f"{tmp_path}/b.parquet row 1"
