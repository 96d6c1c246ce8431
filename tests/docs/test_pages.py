"""Links between the pages lead to files and headings that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "assets").rglob("*.md")]


def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`, as GitHub makes it of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), link
        picture = file.suffix == ".png" and anchor in ("gh-light-mode-only", "gh-dark-mode-only")
        assert not anchor or picture or anchor in anchors(file), link


RECORD = ROOT / "docs" / "benchmarks"
MEASURED = [page for page in RECORD.glob("*.md") if page.stem not in ("README", "where")]


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: str(page.stem))
def test_a_measured_table_says_where(page: Path) -> None:
    """`where.md` names the machine of every page, or of each of its sections with a table."""
    links = re.findall(r"\]\(([^)]+)\)", (RECORD / "where.md").read_text(encoding="utf-8"))
    if page.name in links:
        return
    for section in page.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        if re.search(r"^\|.*\d\.\d", text, re.M):
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            assert f"{page.name}#{anchor}" in links, title
