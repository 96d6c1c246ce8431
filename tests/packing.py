"""Which layers multiply by packed matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from medusa_heads.target import packed as module
from medusa_heads.target.target import TargetModel

MATRICES = 2 * 7 + 1  # of a tiny Llama


@contextmanager
def calls(target: TargetModel, rows: int) -> Iterator[list[int]]:
    """How many layers multiply by packed matrices within the block, which decodes so many rows."""
    assert target.packed is not None
    made: list[int] = []
    product = module.packed_product

    def counted(*args: object) -> object:
        made.append(1)
        return product(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, target.packed.instead(rows):
        patch.setattr(module, "packed_product", counted)
        yield made
