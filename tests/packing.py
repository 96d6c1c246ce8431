"""Which layers multiply by packed matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from medusa_heads.target import packed_layer as module
from medusa_heads.target.target import TargetModel

MATRICES = 2 * 7 + 1  # of a tiny Llama


@contextmanager
def calls(target: TargetModel, rows: int) -> Iterator[list[int]]:
    """How many layers multiply by packed matrices within the block, which decodes so many rows."""
    assert target.packed is not None
    made: list[int] = []
    name = "turned_product" if rows == 1 else "packed_product"
    product = getattr(module, name)

    def counted(*args: object) -> object:
        made.append(1)
        return product(*args)

    with pytest.MonkeyPatch.context() as patch, target.packed.instead(rows):
        patch.setattr(module, name, counted)
        yield made
