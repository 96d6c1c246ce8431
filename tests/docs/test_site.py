"""The site builds without a warning, and no link of it is dead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parents[2]


class Links(HTMLParser):
    """What a page of the site links to, and what on it can be linked to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := found.get(key))}
        self.links += [value for key in ("href", "src") if (value := found.get(key))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Built as `make docs` builds it: strictly, so that a warning ends it."""
    os.environ["NO_MKDOCS_2_WARNING"] = "true"
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    assert config.strict
    build(config)
    yield folder


def test_no_link_is_dead(site: Path) -> None:
    pages = {page: Links(page) for page in sorted(site.rglob("*.html"))}
    assert len(pages) > 30
    for page, found in pages.items():
        if page.name == "404.html":
            continue  # its links begin at the root of a server
        for link in found.links:
            address, anchor = urldefrag(link)
            if link.startswith(("https://", "data:")):
                continue
            file = page if not address else (page.parent / unquote(address)).resolve()
            file = file / "index.html" if file.is_dir() else file
            where = f"{page.relative_to(site)}: {link}"
            assert file.is_file(), where
            pictures = anchor.startswith(("gh-", "only-"))
            assert not anchor or pictures or unquote(anchor) in pages[file].anchors, where


def test_every_page_can_be_found(site: Path) -> None:
    front = Links(site / "index.html").links
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        place = name.removesuffix("README")
        assert any(link.rstrip("/") == place.rstrip("/") for link in front), f"{name} is in no menu"


def test_public_names_are_described(site: Path) -> None:
    import medusa_heads

    described = Links(site / "api" / "index.html").anchors
    for name in medusa_heads.__all__:
        assert name == "__version__" or f"medusa_heads.{name}" in described, name
