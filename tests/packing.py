"""Which layers multiply by packed matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from medusa_heads.target.packed import layer as module
from medusa_heads.target.target import TargetModel

MATRICES = 2 * 7 + 1  # of a tiny Llama


@contextmanager
def calls(target: TargetModel, rows: int) -> Iterator[list[str]]:
    """The products by copies of matrices within the block, which decodes so many rows."""
    assert target.packed is not None
    made: list[str] = []

    def counted(name: str) -> Any:
        product = getattr(module, name)
        return lambda *args: made.append(name) or product(*args)  # type: ignore[func-returns-value]

    with pytest.MonkeyPatch.context() as patch, target.packed.instead(rows):
        for name in ("turned_product", "packed_product"):
            patch.setattr(module, name, counted(name))
        yield made
