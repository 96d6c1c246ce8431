"""Where images of a conversation lie: in its parts or beside it, and in no place out of reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.formats import Conversation, Format
from medusa_heads.data.images import picture, read_image
from medusa_heads.data.sources import as_corpus, load_corpus
from tests.data.corpus_files import contents
from tests.training.seeing import image, save_image, talk


def read(row: dict[str, Any], folder: str | None = "/data") -> Conversation:
    found = Format("messages", ("messages",), folder).read(row)
    assert isinstance(found, Conversation)
    return found


def paths(row: dict[str, Any]) -> list[str]:
    return [source["path"] for source in read(row).images]


def test_images_lie_in_parts_and_in_the_column_for_the_others() -> None:
    assert paths({"messages": talk(image("a.png"), "What?")}) == ["/data/a.png"]
    assert paths({"messages": talk({"type": "image", "url": "file:///x/a%20b.png"}, "?")}) == [
        "/x/a b.png"
    ]
    assert paths({"messages": talk({"image": "sub/../a.png"}, "?")}) == ["/data/a.png"]
    mixed = talk(image(), image("/x/b.png"), "Which?", image())
    row = {"messages": mixed, "images": ["a.png", {"path": "c.png", "bytes": None}]}
    assert paths(row) == ["/data/a.png", "/x/b.png", "/data/c.png"]
    said = read(row).messages[0]["content"]
    assert [part["type"] for part in said] == ["image", "image", "text", "image"]
    assert said[0] == {"type": "image"}  # nothing of where it lies is rendered
    assert paths({"messages": talk("A text."), "images": []}) == []


def test_marks_in_texts_are_parts_where_none_are_given() -> None:
    row = {"messages": talk("<image>What is <image>?"), "images": ["a.png", "b.png"]}
    assert paths(row) == ["/data/a.png", "/data/b.png"]
    assert read(row).messages[0]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "What is "},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]


def test_images_stand_in_all_forms_of_conversations() -> None:
    said = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}]
    found = Format("messages", ("conversations",), "/data").read(
        {"conversations": said, "system": "Be kind.", "images": ["a.png"]}
    )
    assert isinstance(found, Conversation)
    assert [source["path"] for source in found.images] == ["/data/a.png"]
    assert found.messages[1]["content"][0] == {"type": "image"}
    prompt, completion = talk(image(), "What?")[:1], talk("?")[1:]
    found = Format("prompt/completion", ("prompt", "completion"), "/data").read(
        {"prompt": prompt, "completion": completion, "images": [{"path": "/x/a.png"}]}
    )
    assert isinstance(found, Conversation) and found.context == 1
    assert [source["path"] for source in found.images] == ["/x/a.png"]


@pytest.mark.parametrize(
    "given", [7, 0, "", {"a": 1}, ["https://x.org/a.png"], [{"url": "x"}], 1.5]
)
def test_a_column_that_no_message_asks_for_may_hold_whatever(given: Any) -> None:
    row = {"messages": talk("What?"), "images": given}
    assert read(row).messages == talk("What?") and not read(row).images


@pytest.mark.parametrize(
    ("row", "folder", "reason"),
    [
        ({"messages": talk(image(), "?"), "images": ["a", "b"]}, "/d", "holds 2 images.* for 1"),
        ({"messages": talk(image(), image(), "?"), "images": ["a"]}, "/d", "holds 1 .* for 2"),
        ({"messages": talk(image(), "?")}, "/d", "holds 0 images.* for 1"),
        ({"messages": talk(image(), "?"), "images": [None]}, "/d", "holds 0 images.* for 1"),
        ({"messages": talk(image("http://x.org/a.png"), "?")}, "/d", "nothing is fetched"),
        ({"messages": talk(image("http://[x"), "?")}, "/d", "nothing is fetched"),
        ({"messages": talk(image("data:image/png;base64,AA"), "?")}, "/d", "nothing is fetched"),
        ({"messages": talk(image("../a.png"), "?")}, "/d", "outside the folder"),
        ({"messages": talk(image("a/../../a.png"), "?")}, "/d", "outside the folder"),
        ({"messages": talk(image("a.png"), "?")}, None, "no known folder"),
        ({"messages": talk(image("a\0.png"), "?")}, "/d", "a name that no file has"),
        ({"messages": talk({"type": "image", "image": 7}, "?")}, "/d", "is of type int"),
        ({"messages": talk("?", answer=[image("a.png")])}, "/d", "message 1 .* type 'image'"),
    ],
)
def test_images_that_are_nowhere_are_named(
    row: dict[str, Any], folder: str | None, reason: str
) -> None:
    with pytest.raises(BadRow, match=reason):
        read(row, folder)


def test_files_that_are_no_images_are_named(tmp_path: Path) -> None:
    whole = save_image(tmp_path / "a.png", 0)
    (tmp_path / "cut.png").write_bytes(whole.read_bytes()[:-900])
    (tmp_path / "text.png").write_text("no image")
    for name, reason in (
        ("none.png", "there is no image"),
        (".", "there is no image"),
        ("cut.png", "none that can be read"),
        ("text.png", "no known format"),
        ("iVBOR" * 999, "^there is no image '.{200}'$"),  # a file in base64 is too long a name
    ):
        source = {"path": str(tmp_path / name), "bytes": None}
        with pytest.raises(BadRow, match=reason):
            picture(read_image(source), source)
    source = {"path": str(whole), "bytes": None}
    assert picture(read_image(source), source).size == (40, 30)


def test_tables_keep_files_and_not_pictures(tmp_path: Path) -> None:
    """Whether the images are in them, or beside them."""
    file = save_image(tmp_path / "a.png", 0)
    messages = talk(image(), "What?")
    rows = [{"messages": json.dumps(messages), "images": [Image.open(file).copy()]}] * 2
    table = Dataset.from_list(rows)
    [found, _] = contents(as_corpus(table, "memory"))
    assert found.images[0]["bytes"].startswith(b"\x89PNG")
    table.to_parquet(tmp_path / "whole.parquet")
    [found, _] = contents(load_corpus(str(tmp_path / "whole.parquet")))
    assert found.images[0]["bytes"].startswith(b"\x89PNG")

    named = [{"messages": json.dumps(talk(image("a.png"), "What?"))}]
    Dataset.from_list(named).to_parquet(tmp_path / "named.parquet")
    [found] = contents(load_corpus(str(tmp_path / "named.parquet")))
    assert found.images == [{"path": str(file), "bytes": None}]

    kinds = Features({"messages": List({"role": Value("string"), "content": Value("string")})})
    texts = Dataset.from_list([{"messages": talk("<image>What?")}], features=kinds)
    beside = texts.add_column("images", [["a.png"]])
    beside.to_parquet(tmp_path / "beside.parquet")
    [found] = contents(load_corpus(str(tmp_path / "beside.parquet")))
    assert found.images == [{"path": str(file), "bytes": None}]
    (tmp_path / "more").mkdir()
    beside.to_parquet(tmp_path / "more" / "beside.parquet")
    both = [str(tmp_path / "beside.parquet"), str(tmp_path / "more" / "beside.parquet")]
    assert [talk.images[0]["path"] for talk in contents(load_corpus(both))] == [
        str(file),
        str(tmp_path / "more" / "a.png"),
    ]
    for kind in (List(ImageFeature()), List(ImageFeature(), length=1)):
        decoded = table.cast_column("images", kind)
        assert contents(as_corpus(decoded, "memory"))[0].images[0]["bytes"]
