"""What mkdocs asks of this repository: pages from outside `docs/`, and links that lead to them.

mkdocs build
"""

from __future__ import annotations

import posixpath
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Where a file of the repository stands in the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "assets/demo-heads/README.md": "demo-heads.md",
    "assets/demo-target/README.md": "demo-target.md",
} | {
    path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).with_suffix(".md").as_posix()
    for path in sorted((ROOT / "configs").rglob("*.*"))
}
SOURCES = {page: source for source, page in PAGES.items()}
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
LINK = re.compile(r"(?<=\]\()[^)#\s]+(?=[)#])")
_packages: list[tempfile.TemporaryDirectory[str]] = []


def on_config(config: MkDocsConfig) -> None:
    """Let mkdocstrings read the package as it installs: griffe follows no symlink to a folder."""
    folder = tempfile.TemporaryDirectory()
    _packages.append(folder)  # until mkdocs ends
    shutil.copytree(ROOT / "medusa_heads", Path(folder.name) / "medusa_heads")
    python: Any = config.plugins["mkdocstrings"].config.handlers["python"]
    python["paths"] = [folder.name]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages from outside `docs/`."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if not source.endswith(".md"):
            text = f"# {source}\n\n```{Path(source).suffix[1:]}\n{text}```\n"
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to where their files stand in the site."""
    place = page.file.src_uri
    source = SOURCES.get(place, f"docs/{place}")
    parts = FENCED.split(markdown)
    parts[::2] = [
        LINK.sub(lambda link: _moved(link[0], source, place), text) for text in parts[::2]
    ]
    return "".join(parts)


def _moved(link: str, source: str, place: str) -> str:
    """A link in the file `source`, which stands in the site at `place`."""
    if link.startswith("https://"):
        return link
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    target = PAGES.get(meant, meant.removeprefix("docs/"))
    return posixpath.relpath(target, posixpath.dirname(place) or ".")
