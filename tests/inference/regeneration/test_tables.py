"""Tables of prompts, in files and folders of every kind."""

from pathlib import Path

import pytest
from datasets import Dataset

from medusa_heads.inference.regeneration.tables import read_table


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
        ("./nowhere", "there is nothing"),
        ("EMPTY.jsonl", "the file is empty"),
        ("WRONG.doc", "its suffix is none of"),
        ("BROKEN.jsonl", "JSON"),
    ],
)
def test_tables_that_cannot_be_read(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "EMPTY.jsonl").touch()
    (tmp_path / "WRONG.doc").write_text("x")
    (tmp_path / "BROKEN.jsonl").write_text('{"prompt": ')
    place = name if name.startswith(".") else str(tmp_path / name)
    with pytest.raises(ValueError, match=f"expected a corpus of prompts at .*{message}"):
        read_table(place)
