"""Corpora by name: files, folders, the embedded one, and names behind which nothing stands."""

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from medusa_heads.corpus import HELD_OUT
from medusa_heads.training.corpora import Corpus, as_corpus, load_corpus
from medusa_heads.training.formats import Conversation, Document, Tokens

TEXTS = ["a b", "c"]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


def contents(corpus: Corpus) -> list[Any]:
    return [corpus.format.read(row) for row in corpus.rows]


def as_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _jsonl(path: Path) -> None:
    path.write_text(as_lines([{"text": text, "id": 7} for text in TEXTS]))


def _gzipped(path: Path) -> None:
    path.write_bytes(gzip.compress(as_lines([{"text": text} for text in TEXTS]).encode()))


def _array(path: Path) -> None:
    path.write_text(json.dumps([{"text": text} for text in TEXTS], indent=2))


def _csv(path: Path) -> None:
    path.write_text('\ufeffid,text\n1,a b\n2,"c"\n', encoding="utf-8")


def _parquet(path: Path) -> None:
    Dataset.from_list([{"text": text} for text in TEXTS]).to_parquet(path)


def _saved(path: Path) -> None:
    Dataset.from_list([{"text": text} for text in TEXTS]).save_to_disk(path)


def _saved_splits(path: Path) -> None:
    rows = Dataset.from_list([{"text": text} for text in TEXTS])
    DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(path)


def _folder(path: Path) -> None:
    (path / "data").mkdir(parents=True)
    (path / "README.md").write_text("not a corpus")
    (path / "data" / "train-00000.jsonl").write_text(as_lines([{"text": "a b"}]))
    (path / "data" / "train-00001.jsonl").write_text(as_lines([{"text": "c"}]))
    (path / "data" / "test-00000.jsonl").write_text(as_lines([{"text": "held"}]))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", _jsonl),
        ("a.jsonl.gz", _gzipped),
        ("a.json", _jsonl),
        ("array.json", _array),
        ("a.csv", _csv),
        ("a.parquet", _parquet),
        ("saved", _saved),
        ("splits", _saved_splits),
        ("folder", _folder),
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
    (tmp_path / "a.txt").write_text("a b\n\nc")
    assert contents(load_corpus(str(tmp_path / "a.txt"))) == [Document("a b\n\nc")]


def test_fields_of_a_table_stay_texts(tmp_path: Path) -> None:
    """Table libraries read NA and 7 as something else; a field may hold line breaks."""
    (tmp_path / "a.csv").write_text('text\nNA\n7\n"two\nlines"\n\n"x"\n')
    corpus = load_corpus(str(tmp_path / "a.csv"))
    assert [row["text"] for row in corpus.rows] == ["NA", "7", "two\nlines", "x"]
    assert [row["_place"].rsplit(":", 1)[1] for row in corpus.rows] == ["2", "3", "4", "7"]


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
        _parquet(tmp_path / f"{name}.parquet")
    corpus = load_corpus(f"{tmp_path}/*.parquet")
    assert [corpus.place(i) for i in (1, 2)] == [
        f"{tmp_path}/a.parquet row 2",
        f"{tmp_path}/b.parquet row 1",
    ]


def test_corpora_of_two_formats_are_not_joined(tmp_path: Path) -> None:
    _jsonl(tmp_path / "text.jsonl")
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


def test_splits_are_found_by_name(tmp_path: Path) -> None:
    _saved_splits(tmp_path / "saved")
    _folder(tmp_path / "folder")
    assert contents(load_corpus(str(tmp_path / "saved"), "held_out")) == [Document("c")]
    assert contents(load_corpus(str(tmp_path / "folder"), "held_out")) == [Document("held")]
    assert contents(load_corpus(str(tmp_path / "folder"), "test")) == [Document("held")]
    with pytest.raises(ValueError, match=r"has the splits \['test', 'train'\], expected one of"):
        load_corpus(str(tmp_path / "saved"), "test_sft")
    with pytest.raises(ValueError, match="is a file, and files have no split 'test'"):
        load_corpus(str(tmp_path / "folder" / "data" / "train-00000.jsonl"), "test")


@pytest.mark.parametrize("streaming", [False, True])
def test_messages_of_unlike_shapes_stand_in_one_file(streaming: bool, tmp_path: Path) -> None:
    """A table of Arrow would have one type for all contents."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    rows = [{"messages": CHAT}, {"messages": [parts, call], "tools": [{"name": "f"}]}]
    (tmp_path / "a.jsonl").write_text(as_lines(rows))
    first, second = contents(load_corpus(str(tmp_path / "a.jsonl"), streaming=streaming))
    assert first == Conversation(CHAT)
    assert second == Conversation([parts, {**call, "content": ""}], tools=[{"name": "f"}])


def test_a_completion_of_messages_keeps_its_prompt_unlearnt(tmp_path: Path) -> None:
    row = {"prompt": CHAT[:1], "completion": CHAT[1:]}
    (tmp_path / "a.jsonl").write_text(as_lines([row]))
    corpus = load_corpus(str(tmp_path / "a.jsonl"))
    assert contents(corpus) == [Conversation(CHAT, context=1)]
    assert corpus.found_as == "prompt + completion"
    table = as_corpus(Dataset.from_list([row]), "table")
    assert contents(table) == [Conversation(CHAT, context=1)]


def test_another_column_can_hold_the_text(tmp_path: Path) -> None:
    row = {"story": "a", "text": "b", "messages": CHAT}
    (tmp_path / "a.jsonl").write_text(as_lines([row]))
    for corpus in (
        load_corpus(str(tmp_path / "a.jsonl"), text_column="story"),
        as_corpus(Dataset.from_list([row]), "table", text_column="story"),
    ):
        assert contents(corpus) == [Document("a")] and corpus.rows[0]["text"] == "a"
    with pytest.raises(ValueError, match=r"a column 'tale' \(text_column\), got \['messages', "):
        load_corpus(str(tmp_path / "a.jsonl"), text_column="tale")


def test_ready_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(as_lines([{"input_ids": [1, 2], "labels": [-100, 2]}]))
    assert contents(load_corpus(str(tmp_path / "a.jsonl"))) == [Tokens([1, 2], [-100, 2])]


def test_unknown_columns_are_named_with_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"'messages', .* got \['chosen', 'rejected'\]"):
        as_corpus(Dataset.from_list([{"chosen": "a", "rejected": "b"}]), "x")
    with pytest.raises(ValueError, match="the corpus is empty"):
        as_corpus(Dataset.from_list([]), "x")


BAD = [
    ('{"messages": ', r"a.jsonl:2: not valid JSON \(Expecting value at column 13\)"),
    ("[1]", "a.jsonl:2: a JSON list, expected an object"),
    ('{"text": "a"}', "a.jsonl:2: no 'messages'"),
    ('{"messages": null}', "a.jsonl:2: no 'messages'"),
    ('{"messages": 5}', "a.jsonl:2: 'messages' is of type int, expected a list"),
    ('{"messages": "x"}', "'messages' is a text and not a list in JSON"),
    ('{"messages": []}', "a.jsonl:2: 'messages' is empty"),
    ('{"messages": [5]}', "message 0 of 'messages' is of type int, expected a mapping"),
    ('{"messages": [{"content": "a"}]}', "message 0 of 'messages' has the role None"),
    ('{"messages": [{"role": "gpt", "content": "a"}]}', "has the role 'gpt', expected one of"),
    ('{"messages": [{"role": "user", "content": 5}]}', "has content of type int, expected a text"),
    ('{"messages": [{"role": "user", "content": " "}]}', r"'messages' \(user\) is empty"),
    ('{"messages": [{"role": "assistant"}]}', r"'messages' \(assistant\) is empty"),
    ('{"messages": [{"role": "user", "content": "a"}], "tools": 5}', "'tools' is of type int"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_broken_rows_are_named_by_file_and_line(line: str, message: str, tmp_path: Path) -> None:
    good = as_lines([{"messages": CHAT}])
    path = tmp_path / "a.jsonl"
    path.write_text(good + line + "\n" + good)
    with pytest.raises(ValueError, match=f"the corpus has 1 broken row .*{message}.*'skip'"):
        load_corpus(str(path))
    corpus = load_corpus(str(path), on_bad_row="skip")
    assert len(corpus.rows) == 2 and corpus.bad_rows.count == 1
    stream = load_corpus(str(path), streaming=True)
    with pytest.raises(ValueError, match=message):
        list(stream.rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 5}, "'text' is of type int, expected a text"),
        ({"text": " \n"}, "'text' is empty"),
    ],
)
def test_broken_texts(row: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(as_lines([{"text": "a"}, row]))
    with pytest.raises(ValueError, match=f"a.jsonl:2: {message}"):
        load_corpus(str(tmp_path / "a.jsonl"))


def test_broken_completions_tokens_and_bytes(tmp_path: Path) -> None:
    def error(first: dict[str, Any], line: bytes) -> str:
        (tmp_path / "a.jsonl").write_bytes(json.dumps(first).encode() + b"\n" + line + b"\n")
        with pytest.raises(ValueError) as raised:
            load_corpus(str(tmp_path / "a.jsonl"))
        return str(raised.value)

    texts = {"prompt": "a", "completion": "b"}
    assert "are of two kinds" in error(texts, b'{"prompt": "a", "completion": []}')
    assert "'completion' is empty" in error(texts, b'{"prompt": "a", "completion": ""}')
    mixed = json.dumps({"prompt": CHAT[:1], "completion": CHAT[1:]}).encode()
    assert "another kind than the rows before it" in error(texts, mixed)
    tokens = {"input_ids": [1], "labels": [1]}
    assert "expected a list of integers" in error(tokens, b'{"input_ids": "a", "labels": []}')
    assert "something else than integers" in error(tokens, b'{"input_ids": [1.5], "labels": [1]}')
    assert "a.jsonl:2: not UTF-8" in error({"text": "a"}, b'{"text": "\xff"}')


def test_many_broken_rows_are_counted_and_the_first_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(as_lines([{"text": "a"}] + [{"text": ""}] * 8))
    with pytest.raises(ValueError, match=r"8 broken rows \(.*:2: .*:6: [^;]*; and 3 more\)"):
        load_corpus(str(path))
    assert len(load_corpus(str(path), on_bad_row="skip").rows) == 1
    assert "left out 8 broken rows" in caplog.text and f"{path}:2: 'text' is empty" in caplog.text


def test_a_stream_counts_a_broken_row_once_and_warns_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(as_lines([{"text": "a"}] + [{"text": ""}] * 8))
    corpus = load_corpus(str(path), on_bad_row="skip", streaming=True)
    for _ in range(2):
        assert len(list(corpus.rows)) == 1
    assert corpus.bad_rows.count == 8
    assert caplog.text.count("left out a broken row") == 5
    assert "further ones are only counted" in caplog.text


def test_function_calls_and_tools_of_sharegpt() -> None:
    turns = [("system", ""), ("human", "q"), ("function_call", "f()"), ("observation", "")]
    rows = [{"conversations": [{"from": role, "value": text} for role, text in turns]}]
    [found] = contents(as_corpus(Dataset.from_list(rows), "x"))
    assert [message["role"] for message in found.messages] == [
        *("system", "user", "assistant", "tool")
    ]
    assert all(set(message) == {"role", "content"} for message in found.messages)


def test_messages_written_as_json_in_a_table(tmp_path: Path) -> None:
    table = as_corpus(Dataset.from_list([{"messages": json.dumps(CHAT)}]), "x")
    assert contents(table) == [Conversation(CHAT)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "expected a corpus at .*missing.jsonl.*, found none"),
        ("missing/folder", None, "found none: give 'stdlib', a hub id, a folder"),
        ("*.jsonl", None, "found no such file"),
        ("empty.txt", b"", "is empty"),
        ("empty.csv", b"text\n", "is empty or has no row that can be used"),
        ("model.bin", b"a", "expected a folder or a file of the kinds .jsonl,"),
        ("table.csv", b"a,b\n1,2", r"got \['a', 'b'\]"),
        ("bad.csv", b"text\n\xff\n", "not valid CSV"),
        ("bad.txt", b"\xff", "not UTF-8"),
        ("bad.parquet", b"PAR1", "not valid Parquet"),
        ("bad.json", b"[1, ", "not valid JSON"),
    ],
)
def test_files_that_are_no_corpus(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(str(tmp_path / name))


def test_folders_that_are_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not written by save_to_disk, and holds no files"):
        load_corpus(str(tmp_path))
    _jsonl(tmp_path / "test.jsonl")
    with pytest.raises(ValueError, match=r"no file .* belongs to the split 'train' by its name"):
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
