"""Rows that cannot be used: named by file and line, counted, refused or left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_heads.data.sources import load_corpus
from tests.data.corpus_files import CHAT, as_lines

BAD = [
    ('{"messages": ', r"a.jsonl:2: not valid JSON \(Expecting value at column 13\)"),
    ("[1]", "a.jsonl:2: a JSON list, expected an object"),
    ('{"text": "a"}', "a.jsonl:2: no 'messages'"),
    ('{"messages": null}', "a.jsonl:2: no 'messages'"),
    ('{"messages": 5}', "a.jsonl:2: 'messages' is of type int, expected a list"),
    ('{"messages": "x"}', "'messages' is a text and not a list in JSON"),
    ('{"messages": []}', "a.jsonl:2: 'messages' is empty"),
    (json.dumps({"messages": "[" * 9_000}), "'messages' is a text and not a list in JSON"),
    (json.dumps({"messages": f"[{'9' * 5_000}]"}), "'messages' is a text and not a list in JSON"),
    ('{"messages": ' + "9" * 5_000, "not valid JSON .a number is too long"),
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


def test_the_first_rows_are_named_where_all_are_broken(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(as_lines([{"text": " "}] * 7))
    told = "; ".join(f"{tmp_path}/a.jsonl:{row}: 'text' is empty" for row in range(1, 6))
    with pytest.raises(ValueError, match=rf"no row that can be used \({told}; and 2 more\)"):
        load_corpus(str(tmp_path / "a.jsonl"))


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
    assert "'input_ids' is empty" in error(tokens, b'{"input_ids": [], "labels": []}')
    assert "'labels' holds 4294967296" in error(
        tokens, b'{"input_ids": [1], "labels": [4294967296]}'
    )
    deep = b'{"text": ' + b"[" * 100_000
    assert "a.jsonl:2: not valid JSON (nested too deeply" in error({"text": "a"}, deep)
    assert "'text' holds half a character" in error({"text": "a"}, b'{"text": "\\ud83d"}')
    halved = json.dumps({"messages": [CHAT[0], {"role": "assistant", "content": "\ud83d"}]})
    assert "'messages' holds half a character" in error({"messages": CHAT}, halved.encode())
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


@pytest.mark.parametrize("name", ["a.txt", "z.txt", "z.jsonl", "z.csv"])
def test_an_empty_file_is_a_broken_row(name: str, tmp_path: Path) -> None:
    """Wherever it stands among others."""
    (tmp_path / "m.txt").write_text("text")
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=f"has 1 broken row .*/{name}: an empty file.: mend them"):
        load_corpus(str(tmp_path))
    corpus = load_corpus(str(tmp_path), on_bad_row="skip")
    assert corpus.rows["text"][:] == ["text"] and corpus.bad_rows.count == 1
