"""The table of sizes: what the page shows is what the shapes give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medusa_heads import TargetModel
from scripts.pages.sizes import (
    HEADS,
    SHAPES,
    Machine,
    cache_bytes,
    fitting,
    machines,
    planned,
    shaped,
    table,
    training_operations,
)
from tests.conftest import TinyLlama

PAGE = Path(__file__).parents[3] / "docs" / "sizes.md"


def test_the_page_shows_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for lines in (table(), machines()):
        assert "\n".join(lines) in page
        assert len(lines) == len(SHAPES) + 2


def test_what_is_held_in_part_or_in_four_bits_by_hand() -> None:
    """Llama 3.1 8B: 32 layers of 218,112,000 parameters, twice 128,256 x 4,096, and a norm."""
    layer, vocabulary = 218_112_000, 2 * 128256 * 4096
    target = shaped("Llama 3.1 8B")

    def weights(**how: Any) -> float:
        return planned(target, **how).memory["target's weights"]

    assert weights() == 2 * (32 * layer + vocabulary + 4096)
    assert weights(spread=8) == 2 * (4 * layer + 2 * layer + vocabulary + 4096)
    matrices = 32 * (layer - 2 * 4096)
    assert weights(four_bits=True) == weights() - matrices * (2 - 0.5 - 1 / 64)


def test_what_fits_leaves_a_tenth() -> None:
    target = shaped("Llama 3.2 1B")
    needed = sum(planned(target).memory.values())
    enough = Machine(1, needed / 0.9 + 1, 1e12)
    assert fitting(target, enough) == ("whole", 8, needed)
    way, rows, _ = fitting(target, Machine(1, needed / 0.9 - 1e6, 1e12)) or ("", 0, 0.0)
    assert (way, rows) == ("4 bits", 8)
    assert fitting(target, Machine(1, 1e9, 1e12)) is None
    assert (fitting(target, Machine(8, needed / 0.9 - 1e6, 1e12)) or ("",))[0] == "FSDP"


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
