"""What a page quotes of the program is what the program says."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
PLACEHOLDER = re.compile(r"%(?:\.\d+)?[sdfg]")
LEAST = 20  # characters of a sentence's own that make it known


def quoted() -> list[str]:
    blocks = re.findall(r"^ *```text\n(.*?)^ *```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return [textwrap.dedent(block).rstrip("\n") for block in blocks]


@pytest.fixture(scope="module")
def messages() -> list[list[str]]:
    """Of every text of the sources what stands in it whatever its values are, in order."""
    found = []
    for top in ("medusa_heads", "training", "inference"):
        for path in (ROOT / top).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            found += [parts for node in nodes if sum(map(len, parts := fixed_parts(node))) >= LEAST]
    return found


def fixed_parts(node: ast.AST) -> list[str]:
    if isinstance(node, ast.JoinedStr):
        return [str(part.value) for part in node.values if isinstance(part, ast.Constant)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [part.replace("%%", "%") for part in PLACEHOLDER.split(node.value)]
    return []


def says(parts: list[str], sentence: str) -> bool:
    """Whether the parts stand in a sentence, one behind the other."""
    place = 0
    for part in parts:
        place = sentence.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


@pytest.mark.parametrize("sentence", quoted())
def test_the_program_says_so(sentence: str, messages: list[list[str]]) -> None:
    own = [sum(map(len, parts)) for parts in messages if says(parts, sentence)]
    assert own, "no text of the sources is in it"
    assert max(own) >= 0.3 * len(sentence), "most of it is not the program's"


def test_what_nobody_says_is_noticed(messages: list[list[str]]) -> None:
    made_up = "training has made the heads better than fresh ones: by step 120 the loss is 9.1"
    assert not any(says(parts, made_up) for parts in messages)
