"""Corpora by name: files, folders, the embedded one, and names behind which nothing stands."""

import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, config

from medusa_heads.data.corpus import HELD_OUT
from medusa_heads.data.formats import Conversation, Document
from medusa_heads.data.sources import load_corpus
from tests.data.corpus_files import (
    CHAT,
    TEXTS,
    as_lines,
    contents,
    write_folder,
    write_jsonl,
    write_parquet,
    write_saved,
    write_saved_splits,
)


def test_several_names_and_globs_are_joined(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text(as_lines([{"text": name}]))
    for given in (
        f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl",
        f"{tmp_path}/a.jsonl {tmp_path}/b.jsonl",
        [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"],
        f"{tmp_path}/[ab].jsonl",
    ):
        assert contents(load_corpus(given)) == [Document("a"), Document("b")]
    (tmp_path / "with space.jsonl").write_text(as_lines([{"text": "d"}]))
    assert contents(load_corpus(f"{tmp_path}/with space.jsonl")) == [Document("d")]


def test_rows_of_joined_tables_are_named_by_their_own_file(tmp_path: Path) -> None:
    for name in "ab":
        write_parquet(tmp_path / f"{name}.parquet")
    corpus = load_corpus(f"{tmp_path}/*.parquet")
    assert [corpus.place(i) for i in (1, 2)] == [
        f"{tmp_path}/a.parquet row 2",
        f"{tmp_path}/b.parquet row 1",
    ]


def test_corpora_of_two_formats_are_not_joined(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "text.jsonl")
    (tmp_path / "chat.jsonl").write_text(as_lines([{"messages": CHAT}]))
    with pytest.raises(ValueError, match=r"one format, but .* has messages and .* has text"):
        load_corpus(f"{tmp_path}/*.jsonl")


@pytest.mark.parametrize("streaming", [False, True])
def test_tools_that_only_one_of_two_files_has_are_kept(streaming: bool, tmp_path: Path) -> None:
    tools = [{"name": "f"}]
    (tmp_path / "a.jsonl").write_text(as_lines([{"messages": CHAT}]))
    (tmp_path / "b.jsonl").write_text(as_lines([{"messages": CHAT, "tools": tools}]))
    Dataset.from_list([{"messages": CHAT}]).to_parquet(tmp_path / "a.parquet")
    Dataset.from_list([{"messages": CHAT, "tools": tools}]).to_parquet(tmp_path / "b.parquet")
    for suffix in ("jsonl", "parquet"):
        corpus = load_corpus(f"{tmp_path}/?.{suffix}", streaming=streaming)
        assert contents(corpus) == [Conversation(CHAT), Conversation(CHAT, tools=tools)]


def test_an_empty_name_is_not_the_folder_one_is_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the name of a corpus, got an empty one"):
        load_corpus("")


def test_splits_are_found_by_name(tmp_path: Path) -> None:
    write_saved_splits(tmp_path / "saved")
    write_folder(tmp_path / "folder")
    assert contents(load_corpus(str(tmp_path / "saved"), "held_out")) == [Document("c")]
    assert contents(load_corpus(str(tmp_path / "folder"), "held_out")) == [Document("held")]
    assert contents(load_corpus(str(tmp_path / "folder"), "test")) == [Document("held")]
    with pytest.raises(ValueError, match=r"has the splits \['test', 'train'\], expected one of"):
        load_corpus(str(tmp_path / "saved"), "test_sft")
    with pytest.raises(ValueError, match="is a file, and files have no split 'test'"):
        load_corpus(str(tmp_path / "folder" / "data" / "train-00000.jsonl"), "test")


def test_a_split_that_is_asked_for_by_name_must_be_there(tmp_path: Path) -> None:
    write_saved(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    write_jsonl(file := tmp_path / "folder" / "part1.jsonl")
    for split in ("test", "banana", "part2", "--"):
        for folder in ("saved", "folder"):
            with pytest.raises(ValueError, match=f"has no split '{split}'"):
                load_corpus(str(tmp_path / folder), split)
    for split in ("train", "held_out"):
        for name in (tmp_path / "saved", tmp_path / "folder", file):
            assert len(contents(load_corpus(str(name), split))) == len(TEXTS)
            with pytest.raises(ValueError, match=f"ha(s|ve) no split '{split}'"):
                load_corpus(str(name), split, exact=True)
    write_saved_splits(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"has the splits \['test', 'train'\], expected one of"):
        load_corpus(str(tmp_path / "splits"), "held_out", exact=True)
    for split in ("test", "held_out"):
        (tmp_path / "folder" / f"{split}.jsonl").write_text(as_lines([{"text": split}]))
        found = load_corpus(str(tmp_path / "folder"), split, exact=True)
        assert contents(found) == [Document(split)]
    with pytest.raises(ValueError, match="has no split 'test_sft'"):
        load_corpus(str(tmp_path / "folder"), "test_sft")


def test_folders_that_are_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not written by save_to_disk, and holds no files"):
        load_corpus(str(tmp_path))
    write_jsonl(tmp_path / "test.jsonl")
    with pytest.raises(ValueError, match=r"has no split 'train': no file .* by its name"):
        load_corpus(str(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "table.csv").write_text("text,id\na,1\nb,2,3\n")
    with pytest.raises(ValueError, match=r"table.csv:3: fields: 3, where the header has 2"):
        load_corpus(str(tmp_path / "table.csv"))
    with pytest.raises(ValueError, match="cannot be read as a saved dataset"):
        load_corpus(str(tmp_path))


def test_a_hub_id_without_network_is_answered_in_one_sentence_and_soon() -> None:
    begun = time.perf_counter()
    with pytest.raises(ValueError, match=r"at 'someone/corpus': no such file .*HF_HUB_OFFLINE"):
        load_corpus("someone/corpus")
    assert time.perf_counter() - begun < 20
    with pytest.raises(ValueError, match="expected the name of a corpus"):
        load_corpus(" ")


def test_the_embedded_corpus_keeps_its_held_out_packages_apart() -> None:
    train, held_out = load_corpus("stdlib").rows, load_corpus("stdlib", "held_out").rows
    assert {path.split("/")[0] for path in held_out["path"]} == set(HELD_OUT)
    assert not {path.split("/")[0] for path in train["path"]} & set(HELD_OUT)
    with pytest.raises(ValueError, match="stdlib has the splits train and held_out, got 'trian'"):
        load_corpus("stdlib", "trian")


def test_the_folder_of_a_model_is_not_taken_for_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{\n  "model_type": "llama"\n}\n')
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    # A configuration alone may lie beside text.
    with pytest.raises(ValueError, match=r"broken rows \(.*config.json:1"):
        load_corpus(str(tmp_path))
    for name in ("tokenizer.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ValueError, match="is the folder of a model, not of text: give a corp"):
            load_corpus(str(tmp_path))
        (tmp_path / name).unlink()


def test_documents_of_joined_tables_of_tokens_stay_apart(tmp_path: Path) -> None:
    for name, documents in (("a", [0, 0, 1]), ("b", [0, 1, 1])):
        rows = [{"input_ids": [1], "labels": [1], "document": d} for d in documents]
        Dataset.from_list(rows).to_parquet(str(tmp_path / f"{name}.parquet"))
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    for kind in ("parquet", "jsonl"):
        joined = load_corpus([str(tmp_path / f"{name}.{kind}") for name in "ab"])
        assert joined.rows["document"][:] == ["0 0", "0 0", "0 1", "1 0", "1 1", "1 1"]


def test_a_cache_that_cannot_be_written_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with pytest.raises(ValueError, match=r"choose another, by HF_DATASETS_CACHE$"):
        load_corpus(str(tmp_path / "text.jsonl"))


def test_a_large_table_has_few_batches_which_each_take_memory(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"] * 45_000}), tmp_path / "a.parquet")
    rows = load_corpus(str(tmp_path / "a.parquet")).rows
    assert isinstance(rows, Dataset) and len(rows.data.to_batches()) == 3
