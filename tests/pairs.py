"""Pairs of parameters, of which half are quick."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def alternately(some: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """All pairs, by turns quick and slow: each of both is in a quick one."""
    columns = list(others)
    return [
        pytest.param(one, other, marks=[] if (i + j) % 2 == 0 else [pytest.mark.slow])
        for i, one in enumerate(some)
        for j, other in enumerate(columns)
    ]
