"""Which numbers of nodes a drafter is given."""

from __future__ import annotations

from typing import Any

import pytest

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.inference.plan import adaptive
from tests.conftest import TinyLlama


@pytest.mark.parametrize(("node", "sizes"), [(0.0, [0, 7, 15, 63]), (0.03, [0, 7]), (1.0, [0, 1])])
def test_no_whole_step_drafts_more_than_usually_pays(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, node: float, sizes: list[int]
) -> None:
    """The fewer, the more each of them takes; and each number is a graph."""
    clock = Clock({tokens: 1.0 + node * (tokens - 1) for tokens in range(1, 65)})
    monkeypatch.setattr(adaptive, "target_clock", lambda *_: clock)
    steps: dict[str, Any] = {"compile": "steps", "compile_backend": "eager"}
    drafter = TrainingFreeModel(tiny_llama(num_layers=1), **steps).drafter
    assert list(drafter.sizes) == sizes and drafter.num_nodes == sizes[-1] + 1
