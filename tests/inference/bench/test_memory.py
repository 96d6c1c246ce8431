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
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer new tokens are watched, where no longer text is foretold from them."""
    monkeypatch.setattr("medusa_heads.inference.bench.memory._NEW", 12)


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> MedusaModel:
    target = TargetModel(tiny_llama())
    config = HeadsConfig(kind="hydra", num_heads=3, prefix_attention=True)
    return MedusaModel(target, new_heads(target, config).eval(), tree="static:7")


@pytest.fixture(scope="module")
def memory(model: MedusaModel) -> Memory:
    return Memory(model)


LARGER = [(6, 20, 60), (5, 150, 8)]


@pytest.mark.parametrize(
    ("rows", "prompt", "new"),
    [(1, 300, 24), *(pytest.param(*each, marks=pytest.mark.slow) for each in LARGER)],
)
def test_larger_texts_take_what_was_foretold(
    model: MedusaModel,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    prompt: int,
    new: int,
) -> None:
    torch.manual_seed(0)  # some texts hold less, as no step of theirs commits much to many rows
    seen = memory.weights + max(watch(model, rows, prompt, new))
    parts = memory.describe(rows, prompt, new)
    assert parts["most"] == pytest.approx(seen, rel=CLOSE)
    assert parts["cache"] == rows * (prompt + new + 8) * 2 * 2 * 2 * 16 * 4
    # That no more is held for a row than for none would be noticed.
    monkeypatch.setattr(memory, "_curves_53", torch.zeros(5, 3))
    assert memory.describe(rows, prompt, new)["most"] != pytest.approx(seen, rel=CLOSE)


def test_texts_that_may_become_long_are_copied_while_they_grow() -> None:
    assert stacks.held_at_most(100, 500, 10) == 5000
    assert stacks.held_at_most(100, 900, 10) == 9000 * 5 // 3
    large = stacks.held_at_most(100, 1 << 20, 1 << 14)
    assert large == pytest.approx((1 << 34) * (1 + 2 / 3 / 8), rel=1e-6)


@pytest.mark.usefixtures("short_texts")
@pytest.mark.parametrize(
    ("attention", "config", "rows", "prompt"),
    [
        # Scores of all pairs of tokens are held while the prompt is read.
        ("eager", {"num_heads": 2}, 1, 600),
        # Layers that read the text take more of a row beside others than of one alone.
        pytest.param("sdpa", {"kind": "eagle3", "num_heads": 2}, 3, 300, marks=pytest.mark.slow),
    ],
)
def test_what_grows_on_no_straight_line(
    tiny_llama: TinyLlama, attention: str, config: dict[str, Any], rows: int, prompt: int
) -> None:
    llama = tiny_llama(num_layers=1)
    llama.set_attn_implementation(attention)
    target = TargetModel(llama)
    model = MedusaModel(target, new_heads(target, HeadsConfig(**config)).eval(), tree="static:7")
    foretold = Memory(model)
    seen = foretold.weights + max(watch(model, rows, prompt))
    assert foretold.describe(rows, prompt, 24)["most"] == pytest.approx(seen, rel=CLOSE)


@pytest.mark.usefixtures("short_texts")
@pytest.mark.parametrize("limit", [24, pytest.param(96, marks=pytest.mark.slow)])
def test_a_target_that_reads_little(tiny_llama: TinyLlama, limit: int) -> None:
    options: dict[str, Any] = {"max_position_embeddings": limit}
    target = TargetModel(tiny_llama(num_layers=1, **options))
    heads = new_heads(target, HeadsConfig(num_heads=2)).eval()
    memory = Memory(MedusaModel(target, heads, tree="chain"))
    assert torch.isfinite(memory._curves_53).all()
