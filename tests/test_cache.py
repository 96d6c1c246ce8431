"""The row-keeping cache: growth, moves, batch selection, and taking over a transformers cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig

from medusa_heads.cache import RowCache
from tests.conftest import TinyLlama


def config(layers: int = 3) -> LlamaConfig:
    return LlamaConfig(num_hidden_layers=layers, hidden_size=16, num_attention_heads=2)


def rows(start: int, count: int, batch: int = 1) -> torch.Tensor:
    """[batch, 2 heads, count, 4]: every entry of a row names its row number."""
    numbers_T = torch.arange(start, start + count, dtype=torch.float)
    offset_B = 1000 * torch.arange(batch, dtype=torch.float)
    return (numbers_T + offset_B[:, None])[:, None, :, None].expand(batch, 2, count, 4)


def fill(cache: RowCache, start: int, count: int, batch: int = 1) -> None:
    for layer in range(len(cache.layers)):
        new = rows(start, count, batch)
        keys, values = cache.update(new + layer * 0.1, -new - layer * 0.1, layer)
        assert keys.shape[-2] == values.shape[-2] == cache.get_seq_length(layer)


def held(cache: RowCache, layer: int = 0, row: int = 0) -> list[float]:
    keys = cache.row_layers[layer].keys
    assert keys is not None
    return [round(number, 1) for number in keys[row, 0, :, 0].tolist()]


def test_rows_survive_growth() -> None:
    cache = RowCache(config())
    fill(cache, 0, 5)
    for start in range(5, 1200, 239):
        fill(cache, start, 239)
    assert held(cache) == [float(i) for i in range(cache.get_seq_length())]
    assert held(cache, layer=2)[-1] == pytest.approx(cache.get_seq_length() - 1 + 0.2)


def test_updates_write_in_place() -> None:
    cache = RowCache(config())
    fill(cache, 0, 5)
    keys = cache.row_layers[0].keys
    assert keys is not None
    before = keys.data_ptr()
    fill(cache, 5, 9)
    keys = cache.row_layers[0].keys
    assert keys is not None and keys.data_ptr() == before


def test_all_layers_lie_in_one_stack() -> None:
    cache = RowCache(config(layers=4))
    fill(cache, 0, 5)
    assert [stack.shape[0] for stack in cache._stacks.stacks] == [8]


def test_layers_of_unlike_shape_get_stacks_of_their_own_and_waste_nothing() -> None:
    cache = RowCache(config(layers=3))
    for layer, heads in enumerate((2, 1, 2)):
        cache.update(torch.zeros(1, heads, 5, 4), torch.zeros(1, heads, 5, 6), layer)
    shapes = sorted((*stack.shape[:3], stack.shape[4]) for stack in cache._stacks.stacks)
    assert shapes == [(1, 1, 1, 4), (1, 1, 1, 6), (2, 1, 2, 4), (2, 1, 2, 6)]


def test_accepted_rows_move_to_the_front_of_the_new_ones() -> None:
    cache = RowCache(config())
    fill(cache, 0, 6)
    fill(cache, 6, 8)  # a tree of eight nodes
    cache.move_rows(torch.tensor([[6, 8, 11]]), torch.tensor([[6, 7, 8]]))
    cache.set_length(9)
    for layer in range(3):
        expected = [0, 1, 2, 3, 4, 5, 6, 8, 11]
        assert held(cache, layer) == [pytest.approx(n + layer * 0.1) for n in expected]
    values = cache.row_layers[1].values
    assert values is not None and values[0, 0, -1, 0] == pytest.approx(-11.1)


def test_rows_of_a_batch_move_independently_even_where_they_overlap() -> None:
    cache = RowCache(config())
    fill(cache, 0, 6, batch=2)
    fill(cache, 6, 4, batch=2)
    # Row 0 keeps nodes 1 and 3; row 1, shorter by two slots, keeps nodes 0 and 1.
    cache.move_rows(torch.tensor([[7, 9], [6, 7]]), torch.tensor([[6, 7], [4, 5]]))
    cache.set_length(8)
    assert held(cache, row=0) == [0, 1, 2, 3, 4, 5, 7, 9]
    assert held(cache, row=1)[:6] == [1000, 1001, 1002, 1003, 1006, 1007]


def test_finished_rows_leave() -> None:
    cache = RowCache(config())
    fill(cache, 0, 6, batch=3)
    cache.select_batch([0, 2])
    assert [held(cache, row=row)[0] for row in (0, 1)] == [0, 2000]
    fill(cache, 6, 2, batch=2)
    assert cache.get_seq_length() == 8


def test_continues_from_a_transformers_cache(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    ids_1T = torch.arange(12)[None]
    native = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids_1T[:, :8], past_key_values=native, use_cache=True)
        taken = RowCache(model.config)
        taken.take_over(native)
        ours = model(ids_1T[:, 8:], past_key_values=taken, use_cache=True).logits
        whole = model(ids_1T).logits[:, 8:]
    torch.testing.assert_close(ours, whole)
    assert taken.handed_out(model.config) is taken


def test_a_cache_that_dropped_rows_is_refused() -> None:
    sliding = MistralConfig(num_hidden_layers=1, sliding_window=4)
    native = DynamicCache(config=sliding)
    native.update(torch.zeros(1, 2, 9, 4), torch.zeros(1, 2, 9, 4), 0)
    with pytest.raises(ValueError, match="no longer holds every token's row"):
        RowCache(sliding).take_over(native)
