"""Chains that are drafted token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters.chains import ChainSource


def test_what_is_no_number_ends_a_chain_and_teaches_nothing() -> None:
    state: Any = SimpleNamespace(rows=[None], drawing="greedy")
    chances = [0.9]

    def continuation(_: Any) -> Any:
        while True:
            yield [[3]], [chances]

    clock = Clock({1: 1.0, 2: 1.01, 8: 1.05}, learns=False)
    source = ChainSource("chain", continuation, clock, lambda _: 0.1, 6, 0.7)

    def length() -> int:
        (drafted,) = source.draft(state)
        return next(place for place in range(9) if not drafted.offers(place))

    usual = length()
    assert usual > 1
    chances[:] = [float("nan")]
    assert length() == 0
    chances[:] = [0.9]
    assert length() == usual
