"""The pictures of the pages show the numbers of the tables beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.pages.draw import FOLDER, LOOKS, described, pictures, read_table

ROOT = Path(__file__).parents[3]
PICTURES = pictures()


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("look", LOOKS)
def test_a_picture_is_of_today(name: str, look: str) -> None:
    """If not: python -m scripts.pages.draw"""
    file = FOLDER / f"{name}-{look}.png"
    assert b"Description\0" + described(PICTURES[name]).encode() in file.read_bytes()


def test_every_picture_is_shown_light_and_dark() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for name in PICTURES:
        for look in LOOKS:
            assert f"pictures/{name}-{look}.png#gh-{look}-mode-only)" in text, name
    assert len(list(FOLDER.iterdir())) == len(PICTURES) * len(LOOKS)


def test_numbers_are_those_of_the_tables() -> None:
    demo = PICTURES["demo"].shown
    assert ("heads:auto", 3.13, 3.13, 3.13) in demo["bf16 greedy"]
    assert ("heads:auto", 2.46, 2.07, 3.23) in PICTURES["methods-grown"].shown["greedy"]
    assert (15, 2.92) in PICTURES["nodes"].shown["dynamic, greedy"]
    assert PICTURES["batches"].shown[-1] == (16, 1.29)


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n## Other\n\n| a | b |\n|---|---|\n| 1.0 | 2.0 |\n")
    assert read_table(page, "Other", "a") == [{"a": "1.0", "b": "2.0"}]
    with pytest.raises(ValueError, match=r"page\.md has no table of 'b' under 'Other'"):
        read_table(page, "Other", "b")
