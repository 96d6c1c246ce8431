"""Starting kernels in Triton: each start says what releases of Triton decide differently."""

from __future__ import annotations

import ast
from pathlib import Path

import medusa_heads

ROOMS = Path(medusa_heads.__file__).parent


def launches(path: Path) -> list[ast.Call]:
    """`kernel[grid](...)`, wherever a file starts one."""
    calls = [
        node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)
    ]
    return [call for call in calls if isinstance(call.func, ast.Subscript)]


def test_each_says_how_products_that_are_added_are_rounded() -> None:
    """Triton 3.9 warns of the others, and 3.10 makes other kernels of them."""
    files = [path for path in ROOMS.rglob("*.py") if "@triton.jit" in path.read_text("utf-8")]
    found = {path.name: launches(path) for path in files}
    assert sum(map(len, found.values())) >= 9 and all(found.values())
    for name, calls in found.items():
        for call in calls:
            spread = [ast.unparse(each.value) for each in call.keywords if each.arg is None]
            assert "FUSED" in spread, f"{name}:{call.lineno}"
