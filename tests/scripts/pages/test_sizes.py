"""The table of sizes: what the page shows is what the shapes give."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_heads import TargetModel
from scripts.pages.sizes import HEADS, SHAPES, cache_bytes, shaped, table, training_operations
from tests.conftest import TinyLlama

PAGE = Path(__file__).parents[3] / "docs" / "sizes.md"


def test_the_page_shows_the_table() -> None:
    lines = table()
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")
    assert len(lines) == len(SHAPES) + 2


def test_shapes_are_those_of_the_models() -> None:
    parameters = {
        name: round(sum(weight.numel() for weight in shaped(name).model.parameters()) / 1e9, 2)
        for name in ("Llama 3.2 1B", "Llama 3.1 8B", "Qwen 2.5 7B")
    }
    assert parameters == {"Llama 3.2 1B": 1.24, "Llama 3.1 8B": 8.03, "Qwen 2.5 7B": 7.62}


@pytest.mark.parametrize("tied", [False, True])
def test_operations_by_hand(tied: bool, tiny_llama: TinyLlama) -> None:
    """Hidden 64, feed-forward 128, two layers, 2 of 4 heads of keys; vocabulary 199."""
    target = TargetModel(tiny_llama(tie_word_embeddings=tied))
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    attention = 2 * 2 * 10 * 64
    heads = 4 * HEADS.num_heads * 64 * (199 + 64)
    assert training_operations(target, HEADS, 10) == 2 * (2 * layer + 64) + attention + heads
    assert cache_bytes(target) == 2 * 2 * 2 * 2 * 16
