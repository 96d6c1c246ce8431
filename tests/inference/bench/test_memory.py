"""Memory foretold from small texts, against larger ones that are watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaModel, TargetModel
from medusa_heads.heads import new_heads
from medusa_heads.inference.bench.memory import Memory, watch
from medusa_heads.target import stacks
from tests.conftest import TinyLlama

CLOSE = 0.1  # of all; the tiny target weighs less than what a few rows hold beside it


@pytest.fixture
def model(tiny_llama: TinyLlama) -> MedusaModel:
    target = TargetModel(tiny_llama(num_layers=3))
    config = HeadsConfig(kind="hydra", num_heads=3, prefix_attention=True)
    return MedusaModel(target, new_heads(target, config).eval(), tree="static:7")


@pytest.mark.parametrize(("rows", "prompt", "new"), [(1, 300, 24), (6, 20, 60), (5, 150, 8)])
def test_larger_texts_take_what_was_foretold(
    model: MedusaModel, rows: int, prompt: int, new: int
) -> None:
    memory = Memory(model)
    seen, foretold = max(watch(model, rows, prompt, new)), max(memory.peaks(rows, prompt, new))
    assert memory.weights + foretold == pytest.approx(memory.weights + seen, rel=CLOSE)
    parts = memory.describe(rows, prompt, new)
    assert parts["most"] == pytest.approx(memory.weights + foretold)
    assert parts["cache"] == rows * (prompt + new + 8) * 3 * 2 * 2 * 16 * 4
    # A foretelling that left one of its lines out would be noticed.
    for line in range(3):
        memory = Memory(model)
        memory._lines_33[line] = 0
        wrong = memory.weights + max(memory.peaks(rows, prompt, new))
        if wrong != pytest.approx(memory.weights + seen, rel=CLOSE):
            return
    pytest.fail("no line makes a difference")


def test_texts_that_may_become_long_are_copied_while_they_grow() -> None:
    assert stacks.held_at_most(100, 500, 10) == 5000
    assert stacks.held_at_most(100, 900, 10) == 9000 * 5 // 3
    large = stacks.held_at_most(100, 1 << 20, 1 << 14)
    assert large == pytest.approx((1 << 34) * (1 + 2 / 3 / 8), rel=1e-6)


def test_a_target_that_reads_little(tiny_llama: TinyLlama) -> None:
    options: dict[str, Any] = {"max_position_embeddings": 96}
    target = TargetModel(tiny_llama(**options))
    heads = new_heads(target, HeadsConfig(num_heads=2)).eval()
    memory = Memory(MedusaModel(target, heads, tree="chain"))
    assert torch.isfinite(memory._lines_33).all()
