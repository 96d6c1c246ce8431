"""Tables of prompts, in files and folders of every kind."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from medusa_heads.inference.regeneration.dialogues import Unanswerable, read_dialogues
from medusa_heads.inference.regeneration.prompts import Talk
from medusa_heads.inference.regeneration.tables import read_table
from tests.inference.speaking import make_tokenizer

ROLES = ("user", "system", "human", "gpt")


def test_tables_of_every_kind(tmp_path: Path) -> None:
    table = Dataset.from_dict({"prompt": ["a", "b"]})
    table.to_json(tmp_path / "t.jsonl")
    table.to_parquet(tmp_path / "t.parquet")
    table.to_csv(tmp_path / "t.csv")
    table.save_to_disk(str(tmp_path / "saved"))
    for name in ("t.jsonl", "t.parquet", "t.csv", "saved"):
        assert read_table(str(tmp_path / name))["prompt"] == ["a", "b"]
    (tmp_path / "t.txt").write_text("one\ntwo")
    assert read_table(str(tmp_path / "t.txt"))["text"] == ["one\ntwo"]
    assert "path" in read_table("stdlib", "held_out").column_names
    (tmp_path / "q.csv").write_bytes(b'\xef\xbb\xbf"prompt"\r\n7\r\nNA\r\n')
    assert read_table(str(tmp_path / "q.csv"))["prompt"] == ["7", "NA"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "expected a corpus at '.*nowhere', found none"),
        ("EMPTY.jsonl", "the corpus is empty or has no row .*EMPTY.jsonl: an empty file"),
        ("WRONG.doc", "expected a folder or a file of the kinds"),
        ("BROKEN.jsonl", r"BROKEN.jsonl:1: not valid JSON .Expecting value at column 11"),
        ("LATIN.jsonl", r"has 1 broken row .*LATIN.jsonl:2: not UTF-8"),
        ("DEEP.jsonl", r"has 1 broken row .*DEEP.jsonl:2: "),
        ("HALF.jsonl", r"has 1 broken row .*HALF.jsonl:1: 'prompt' holds half a character"),
        ("CUT.parquet", "'.*CUT.parquet' is not valid Parquet"),
        ("NONE.jsonl", r"one of the columns \['messages', 'conversations', .*got \['question'\]"),
    ],
)
def test_tables_that_cannot_be_read(
    name: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "EMPTY.jsonl").touch()
    (tmp_path / "WRONG.doc").write_text("x")
    good = '{"prompt": "a"}\n'
    (tmp_path / "BROKEN.jsonl").write_text('{"prompt": ')
    (tmp_path / "LATIN.jsonl").write_bytes(good.encode() + b'{"prompt": "\xe4"}')
    (tmp_path / "DEEP.jsonl").write_text(good + "[" * 100_000 + "]" * 100_000)
    (tmp_path / "HALF.jsonl").write_text('{"prompt": "\\ud800"}\n' + good)
    Dataset.from_dict({"prompt": ["a"] * 9}).to_parquet(tmp_path / "CUT.parquet")
    (tmp_path / "CUT.parquet").write_bytes((tmp_path / "CUT.parquet").read_bytes()[:200])
    (tmp_path / "NONE.jsonl").write_text('{"question": "a"}')
    place = name if name.startswith(".") else str(tmp_path / name)
    with pytest.raises(ValueError, match=message) as raised:
        read_table(place)
    assert "Failed to load" not in capfd.readouterr().err
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_rows_with_roles_that_nobody_knows_are_named_before_anybody_is_asked(
    kind: str, tmp_path: Path
) -> None:
    rows: list[Any] = [{"messages": [{"role": role, "content": "a"}]} for role in ROLES]
    path = tmp_path / f"talks.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        Dataset.from_list(rows).save_to_disk(path)
    place = f"{path}:3" if kind == "jsonl" else f"{path} row 3"
    said = f"{place}: message 0 of 'messages' has the role 'human', expected one of"
    with pytest.raises(ValueError, match="has 2 broken rows") as raised:
        read_table(str(path))
    assert said in str(raised.value)
    assert len(read_table(str(path), on_bad_row="skip")) == 2


def test_conversations_of_sharegpt_are_asked_as_those_of_messages(tmp_path: Path) -> None:
    """An assistant's message may be empty: it is written anew."""
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": ""}]
    table = Dataset.from_list([{"conversations": talk}])
    table.to_json(tmp_path / "talks.jsonl")
    table.to_parquet(tmp_path / "talks.parquet")
    for name in ("talks.jsonl", "talks.parquet"):
        (dialogue,) = read_dialogues(read_table(str(tmp_path / name)), make_tokenizer())
        assert dialogue.ask(0)[1] == Talk([{"role": "user", "content": "Hi"}])
    table = table.add_column("system", ["Be kind."])
    table.to_json(tmp_path / "talks.jsonl")
    table.to_parquet(tmp_path / "talks.parquet")
    for name in ("talks.jsonl", "talks.parquet"):
        (dialogue,) = read_dialogues(read_table(str(tmp_path / name)), make_tokenizer())
        system = {"role": "system", "content": "Be kind."}
        assert dialogue.ask(0)[1] == Talk([system, {"role": "user", "content": "Hi"}])


def test_what_tables_fill_in_is_not_asked() -> None:
    """A table gives all tools the keys of all others, with nothing in them."""
    asked = [{"role": "user", "content": "Hi"}]
    rows = [{"messages": asked, "tools": [{"name": "f", "has": {key: 1}}]} for key in "ab"]
    tokenizer = make_tokenizer("{{ tools }}")
    dialogues = read_dialogues(Dataset.from_list(rows), tokenizer)
    texts = [tokenizer.decode([*each.ask(0)[0]]) for each in dialogues]
    assert texts == [str(row["tools"]) for row in rows]
    as_text = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    as_text[0]["tools"] = '[{"default": null}]'
    given, _ = read_dialogues(Dataset.from_list(as_text), tokenizer)
    assert tokenizer.decode([*given.ask(0)[0]]) == "[{'default': None}]"


def test_an_image_is_not_asked_about() -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    table = Dataset.from_list([{"messages": [{"role": "user", "content": [part]}]}])
    (dialogue,) = read_dialogues(table, make_tokenizer())
    with pytest.raises(Unanswerable, match="holds a part of type 'image_url'"):
        dialogue.ask(0)


def test_conversations_in_json_are_asked_as_such(tmp_path: Path) -> None:
    talk = json.dumps([{"role": "user", "content": "Hi"}])
    table, mixed = tmp_path / "asked.parquet", tmp_path / "mixed.parquet"
    Dataset.from_dict({"prompt": [talk, talk]}).to_parquet(str(table))
    dialogues = read_dialogues(read_table(str(table)), make_tokenizer())
    assert dialogues.talks
    asked = [make_tokenizer().decode([*each.ask(0)[0]]) for each in dialogues]
    assert asked == ["u:Hia:"] * 2
    Dataset.from_dict({"prompt": [talk, "Hi", talk]}).to_parquet(str(mixed))
    with pytest.raises(ValueError, match=r"1 broken row .*row 2: it is of another kind"):
        read_table(str(mixed))
