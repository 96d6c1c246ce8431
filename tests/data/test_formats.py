"""Forms of a corpus: recognised by their columns, and read whatever holds them."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.formats import (
    QUESTIONS,
    Completion,
    Conversation,
    Document,
    Question,
    Tokens,
    recognise,
)
from medusa_heads.data.sources import as_corpus, load_corpus
from tests.data.corpus_files import CHAT, as_lines, contents


@pytest.mark.parametrize("streaming", [False, True])
def test_messages_of_unlike_shapes_stand_in_one_file(streaming: bool, tmp_path: Path) -> None:
    """A table of Arrow would have one type for all contents."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    text = {"role": "user", "content": "Hi"}
    rows = [{"messages": CHAT}, {"messages": [parts, call], "tools": [{"name": "f"}]}]
    (tmp_path / "a.jsonl").write_text(as_lines(rows))
    first, second = contents(load_corpus(str(tmp_path / "a.jsonl"), streaming=streaming))
    assert first == Conversation(CHAT)
    assert second == Conversation([text, {**call, "content": ""}], tools=[{"name": "f"}])


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


@pytest.mark.parametrize(
    ("mask", "labels", "problem"),
    [
        ([1, 1, 0], [-100, 2, -100], None),
        ([0, 1, 1], [-100, 2, 3], "attention_mask begins with 0, and padding on the left"),
        ([1, 1, 0], [-100, 2, 3], "attention_mask is 0 where labels tell what to learn"),
    ],
)
def test_padding_of_a_file_is_no_text(
    mask: list[int], labels: list[int], problem: str | None, tmp_path: Path
) -> None:
    fine = {"input_ids": [1], "labels": [1]}
    row = {"input_ids": [1, 2, 3], "labels": labels, "attention_mask": mask}
    (tmp_path / "a.jsonl").write_text(as_lines([fine, row]))
    tables = [str(tmp_path / name) for name in ("a.parquet", "b.parquet")]
    for name in tables:
        Dataset.from_list([fine | {"attention_mask": [1]}, row]).to_parquet(name)
    assert load_corpus(tables).rows["attention_mask"][:] == [[1], mask] * 2
    if problem is None:
        assert contents(load_corpus(str(tmp_path / "a.jsonl")))[1] == Tokens([1, 2, 3], labels)
    else:
        with pytest.raises(ValueError, match=f"a.jsonl:2: {problem}"):
            load_corpus(str(tmp_path / "a.jsonl"))


def test_unknown_columns_are_named_with_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"'messages', .* got \['chosen', 'rejected'\]"):
        as_corpus(Dataset.from_list([{"chosen": "a", "rejected": "b"}]), "x")
    with pytest.raises(ValueError, match="the corpus is empty"):
        as_corpus(Dataset.from_list([]), "x")
    splits = DatasetDict({"train": Dataset.from_list([{"text": "a"}])})
    with pytest.raises(ValueError, match=r"x has the splits \['train'\]: give one of them"):
        as_corpus(splits, "x")


@pytest.mark.parametrize("kind", ["numpy", "torch", "pandas", "arrow"])
def test_rows_are_read_whatever_they_are_formatted_as(kind: str) -> None:
    tokens = Dataset.from_list([{"input_ids": [1, 2], "labels": [-100, 2]}])
    assert contents(as_corpus(tokens.with_format(kind), "x")) == [Tokens([1, 2], [-100, 2])]


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
    halves = {"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:])}
    found = contents(as_corpus(Dataset.from_list([halves]), "x"))
    assert found == [Conversation(CHAT, context=1)]
    told = contents(as_corpus(Dataset.from_list([{"messages": CHAT, "tools": "[]"}]), "x"))
    assert told == [Conversation(CHAT, tools=None)]
    asked = recognise(["prompt"], known=QUESTIONS)
    assert asked.read(halves) == Conversation(CHAT[:1])


@pytest.mark.parametrize("text", ["[1, 2]", "[]", "[", '[{"a": 1}]', "[[]]", "Hi", "{}"])
def test_other_json_is_a_text(text: str) -> None:
    messages = json.dumps(CHAT[1:])
    assert recognise(["prompt"], known=QUESTIONS).read({"prompt": text}) == Question(text)
    for prompt, completion in ((text, text), (text, messages), (messages, text)):
        row = {"prompt": prompt, "completion": completion}
        assert recognise([*row]).read(row) == Completion(prompt, completion)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_tokens_may_name_their_document_or_not(streaming: bool, tmp_path: Path) -> None:
    row = {"input_ids": [1, 2], "labels": [1, 2]}
    rows = [row, {**row, "document": 7}, {**row, "document": None}, {**row, "document": "a"}]
    for given in (rows, rows[::-1]):
        (tmp_path / "a.jsonl").write_text(as_lines(given))
        found = contents(load_corpus(str(tmp_path / "a.jsonl"), streaming=streaming))
        names = [None, "7", None, "a"]
        assert [each.document for each in found] == (names if given is rows else names[::-1])


def test_text_parts_are_one_text_and_other_parts_are_named() -> None:
    """Templates write a list as Python does, or leave it out, or put an image where none is."""
    parts = [{"type": "text", "text": "What "}, "is ", {"text": "this?", "image": None}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}
    messages = recognise(["messages"])
    found: Any = messages.read({"messages": [{"role": "user", "content": parts}, answer]})
    assert [said["content"] for said in found.messages] == ["What is this?", "A cat."]
    for part, reason in (
        ({"type": "image_url", "image_url": {"url": "x"}}, "a part of type 'image_url'"),
        ({"video": "x.mp4"}, "a part of type 'video'"),
        ({"type": "text"}, "a part that is NoneType"),
        (7, "a part that is int"),
    ):
        row = {"messages": [{"role": "user", "content": [*parts, part]}, answer]}
        with pytest.raises(BadRow, match=f"message 0 of 'messages' holds {reason}"):
            messages.read(row)
    for blank in ([], [{"type": "text", "text": " "}]):
        with pytest.raises(BadRow, match=r"message 0 of 'messages' \(user\) is empty"):
            messages.read({"messages": [{"role": "user", "content": blank}, answer]})


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
    }


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"function": {"name": name, "parameters": {"properties": properties}}}


@pytest.mark.parametrize("streaming", [False, True])
def test_what_tables_fill_in_is_no_value(streaming: bool, tmp_path: Path) -> None:
    """A table gives all calls and tools the keys of all others, with nothing in them."""
    asked = {"role": "user", "content": "What time is it?"}
    rows = [
        {"messages": [asked, called("time", zone="CET")], "tools": [tool("time", zone={"a": 1})]},
        {"messages": [asked, called("sky", city="Rome")], "tools": [tool("sky", city={"b": 2})]},
    ]
    table = Dataset.from_list(rows)
    assert table[0]["tools"][0] != rows[0]["tools"][0]
    table.to_parquet(tmp_path / "a.parquet")
    for corpus in (
        load_corpus(str(tmp_path / "a.parquet"), streaming=streaming),
        as_corpus(table.to_iterable_dataset() if streaming else table, "table"),
    ):
        for found, row in zip(contents(corpus), rows, strict=True):
            assert found.tools == row["tools"]
            assert found.messages[1] == {**row["messages"][1], "content": ""}


@pytest.mark.parametrize("streaming", [False, True])
def test_null_in_json_is_a_value(streaming: bool, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "?"}, {**called("time", zone=None), "content": ""}]
    row = {"messages": said, "tools": [tool("time", zone={"default": None})]}
    (tmp_path / "a.jsonl").write_text(as_lines([row]))
    as_text = {name: json.dumps(value) for name, value in row.items()}
    for corpus in (
        load_corpus(str(tmp_path / "a.jsonl"), streaming=streaming),
        as_corpus(Dataset.from_list([as_text]), "table"),
    ):
        assert contents(corpus) == [Conversation(said, tools=row["tools"])]


def test_a_weight_is_nothing_or_one() -> None:
    messages = recognise(["messages"])
    for weight in (0, 1, 0.0, 1.0, None, 0.5, 2, -1, "0", True, [1]):
        row = {"messages": [{**CHAT[0], "weight": 7}, {**CHAT[1], "weight": weight}]}
        if weight is not True and weight in (0, 1, None):
            assert isinstance(messages.read(row), Conversation)
            continue
        with pytest.raises(BadRow, match="message 1 of 'messages' has the weight "):
            messages.read(row)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_system_text_in_a_column_of_its_own_comes_first(kind: str, tmp_path: Path) -> None:
    """As some corpora in the form of ShareGPT have it."""
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    own = {"from": "system", "value": "Own."}
    rows = [
        {"conversations": talk, "system": "Be kind."},
        {"conversations": [own, *talk], "system": "Be kind."},
        {"conversations": talk, "system": ""},
        {"conversations": talk, "system": None},
    ]
    path = tmp_path / f"talks.{kind}"
    if kind == "jsonl":
        path.write_text(as_lines(rows))
    else:
        Dataset.from_list(rows).to_parquet(path)
    kind_of = {"role": "system", "content": "Be kind."}
    found = [each.messages for each in contents(load_corpus(str(path)))]
    system = {"role": "system", "content": "Own."}
    assert found == [[kind_of, *CHAT], [system, *CHAT], CHAT, CHAT]
    if kind == "parquet":
        Dataset.from_list([{"conversations": talk}]).to_parquet(tmp_path / "other.parquet")
        both = load_corpus([str(path), str(tmp_path / "other.parquet")])
        assert [each.messages for each in contents(both)] == [*found, CHAT]
    read = recognise(["conversations"]).read
    with pytest.raises(BadRow, match="'system' is of type int, expected a text"):
        read({"conversations": talk, "system": 7})
