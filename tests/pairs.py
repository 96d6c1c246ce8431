"""Parameters, their pairs and triples, of which some are quick."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest


def alternately(
    some: Iterable[Any], others: Iterable[Any], *, slow: Container[Any] = ()
) -> list[Any]:
    """All pairs, by turns quick and slow: each of both is in a quick one, but for those of `some`
    that are named as slow."""
    columns = list(others)
    return [
        pytest.param(one, other, marks=[pytest.mark.slow] if (i + j) % 2 or one in slow else [])
        for i, one in enumerate(some)
        for j, other in enumerate(columns)
    ]


def with_slow(quick: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """The quick ones, and behind them those that are slow; a tuple is one of several names."""
    params = [each if isinstance(each, tuple) else (each,) for each in slow]
    return [*quick, *(pytest.param(*each, marks=pytest.mark.slow) for each in params)]


def meeting(some: Sequence[Any], others: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """All triples of three columns of one length: any two values of different columns are together
    in a quick one."""
    assert len(some) == len(others) == len(more)
    return [
        pytest.param(a, b, c, marks=[] if (i + j + k) % len(some) == 0 else [pytest.mark.slow])
        for i, a in enumerate(some)
        for j, b in enumerate(others)
        for k, c in enumerate(more)
    ]
