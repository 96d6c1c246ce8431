"""The pages that say where things live agree with the folders, and no room is overfull."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WINGS = ("medusa_heads", "training", "inference", "scripts")
MOST_FILES, MOST_LINES = 16, 300
UNMIRRORED = {"docs", "llama_cpp", "vllm"}  # what is proved of the pages, and by other engines


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def tree() -> dict[str, str]:
    """The paths of the tree in architecture.md, and what it says of each."""
    drawn = re.search(r"^```\n(.*?)^```", page("docs/architecture.md"), re.M | re.S)
    assert drawn is not None
    said: dict[str, str] = {}
    above: list[str] = []
    for line in drawn[1].splitlines():
        name, text = line.split(maxsplit=1)
        depth = (len(line) - len(line.lstrip())) // 2
        above = [*above[:depth], name]
        said["".join(above)] = text
    return said


def sources(top: str) -> dict[str, list[Path]]:
    """Folders below `top` that hold Python files, as `inference/engine/`, with these files."""
    found = {}
    for folder, _, names in os.walk(ROOT / top):  # through no symlink
        files = [Path(folder) / name for name in sorted(names) if name.endswith(".py")]
        if files:
            found[Path(folder).relative_to(ROOT).as_posix() + "/"] = files
    return found


ROOMS = {room: files for wing in WINGS for room, files in sources(wing).items()}
# `medusa_heads` says what the package is for; folders of scripts are no packages.
UNSAID = {room for room in ROOMS if room == "medusa_heads/" or room.startswith("scripts/")}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHANGES = re.findall(r"^\| .+ \| `(\S+/)` \| `(\S+\.py)` \|$", page("CONTRIBUTING.md"), re.M)


def test_the_tree_is_that_of_the_folders() -> None:
    drawn = {path for path in tree() if path.startswith(WINGS)}
    nouns = {f"medusa_heads/{path.name}" for path in ROOMS["medusa_heads/"]}
    assert drawn == ROOMS.keys() | {"scripts/"} | nouns - {"medusa_heads/__init__.py"}
    assert all((ROOT / path).exists() for path in tree())


@pytest.mark.parametrize("room", sorted(ROOMS.keys() - UNSAID))
def test_the_tree_says_of_a_room_what_it_says_of_itself(room: str) -> None:
    first = (ast.get_docstring(ast.parse(page(f"{room}__init__.py"))) or "").splitlines()[0]
    assert tree()[room] == first.rstrip(".")


def test_the_tests_lie_in_the_same_rooms() -> None:
    rooms = {room.removeprefix("medusa_heads/") for room in ROOMS} | {"scripts/"}
    tests = {room.removeprefix("tests/") for room in sources("tests")}
    assert tests - rooms == {f"{name}/" for name in UNMIRRORED}


def test_no_room_and_no_file_is_overfull() -> None:
    everywhere = ROOMS | sources("tests")
    full = {room: len(files) for room, files in everywhere.items() if len(files) > MOST_FILES}
    assert full == {}
    for path in (path for files in everywhere.values() for path in files):
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines <= MOST_LINES, f"{path.relative_to(ROOT)}: {lines} lines"


def test_likely_changes_are_listed() -> None:
    assert len(CHANGES) >= 12


@pytest.mark.parametrize(("room", "test"), CHANGES)
def test_a_change_has_a_room_and_a_test_to_copy(room: str, test: str) -> None:
    assert room in ROOMS
    assert "\ndef test_" in page(test)
    mirrored = "tests/" + room.removeprefix("medusa_heads/")
    assert test.startswith(mirrored)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_that_a_page_names_is_there(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for named in re.findall(rf"`((?:{'|'.join(WINGS)}|tests)/[\w/.]*)`", text):
        assert (ROOT / named).exists(), named
