"""The row-keeping cache: growth, moves, batch selection, and taking over a transformers cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig

from medusa_heads.cache_names import cache_argument
from medusa_heads.target.cache import RowCache
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
    with torch.device("meta"):
        cache.select_batch([0, 2])
    assert [held(cache, row=row)[0] for row in (0, 1)] == [0, 2000]
    fill(cache, 6, 2, batch=2)
    assert cache.get_seq_length() == 8


def test_continues_from_a_transformers_cache(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    ids_1T = torch.arange(12)[None]
    native = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids_1T[:, :8], use_cache=True, **{cache_argument(model.forward): native})
        taken = RowCache(model.config)
        taken.take_over(native)
        ours = model(ids_1T[:, 8:], use_cache=True, **{cache_argument(model.forward): taken}).logits
        whole = model(ids_1T).logits[:, 8:]
    torch.testing.assert_close(ours, whole)
    assert taken.handed_out(model.config) is taken


def test_a_cache_that_dropped_rows_is_refused() -> None:
    sliding = MistralConfig(num_hidden_layers=1, sliding_window=4)
    native = DynamicCache(config=sliding)
    native.update(torch.zeros(1, 2, 9, 4), torch.zeros(1, 2, 9, 4), 0)
    with pytest.raises(ValueError, match="no longer holds every token's row"):
        RowCache(sliding).take_over(native)


def test_an_announced_length_is_never_exceeded() -> None:
    cache = RowCache(config(), slots=300)
    fill(cache, 0, 5)
    assert cache._stacks.capacity == 300  # near enough to be taken at once
    cache = RowCache(config(), slots=1000)
    fill(cache, 0, 5)
    capacities = set()
    for start in range(5, 1000, 5):
        fill(cache, start, 5)
        capacities.add(cache._stacks.capacity)
    assert sorted(capacities) == [261, 391, 586, 879, 1000]
    fill(cache, 1000, 3)  # what was announced is no limit
    assert held(cache) == [float(i) for i in range(1003)]


def test_what_was_announced_at_first_can_be_announced_anew() -> None:
    cache = RowCache(config(), slots=300)
    fill(cache, 0, 299)
    cache.announce(320)
    fill(cache, 299, 5)
    assert cache._stacks.capacity == 320
    assert held(cache) == [float(i) for i in range(304)]


def unlike(rows: int, start: int, count: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of unlike widths, as latent attention has them, and of unlike heads."""
    heads = 1 + layer % 2
    numbers_T = torch.arange(start, start + count, dtype=torch.float) + 0.1 * layer
    numbers_BT = numbers_T + 1000 * torch.arange(rows)[:, None]
    keys = numbers_BT[:, None, :, None].expand(rows, heads, count, 4)
    return keys, -numbers_BT[:, None, :, None].expand(rows, heads, count, 6)


@pytest.mark.parametrize("batch", [1, 3])
def test_stacks_of_unlike_shape_move_grow_and_let_rows_go_alike(batch: int) -> None:
    cache = RowCache(config(layers=4))

    def append(rows: int, start: int, count: int) -> None:
        for layer in range(4):
            cache.update(*unlike(rows, start, count, layer), layer)

    append(batch, 0, 6)
    assert len(cache._stacks.stacks) == 4
    append(batch, 6, 4)
    cache.move_rows(torch.tensor([[7, 9]] * batch), torch.tensor([[6, 7]] * batch))
    cache.set_length(8)
    append(batch, 10, 400)  # beyond the first capacity
    kept = [0, 1, 2, 3, 4, 5, 7, 9, *range(10, 410)]
    rows = list(range(batch))
    if batch > 1:
        rows = [0, 2]
        cache.select_batch(rows)
    for layer, row_layer in enumerate(cache.row_layers):
        for place, row in enumerate(rows):
            for states, sign in ((row_layer.keys, 1), (row_layer.values, -1)):
                numbers_T = torch.tensor(kept, dtype=torch.float) + 0.1 * layer + 1000 * row
                for head in range(states.shape[1]):
                    torch.testing.assert_close(states[place, head, :, 0], sign * numbers_T)


def test_each_row_keeps_its_own_path_behind_its_own_end() -> None:
    cache = RowCache(config())
    fill(cache, 0, 6, batch=4)
    fill(cache, 6, 5, batch=4)  # a tree of five nodes, behind the longest row
    with torch.device("meta"):  # what names no device would lie on another one than the cache
        lengths = cache.keep_paths([[0, 2, 4], [0, 3], [0], []], [6, 3, 5, 6])
    assert lengths == [9, 5, 6, 6]
    kept = [[0, 1, 2, 3, 4, 5, 6, 8, 10], [0, 1, 2, 6, 9], [0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 5]]
    for layer in range(3):
        for row, (length, slots) in enumerate(zip(lengths, kept, strict=True)):
            assert held(cache, layer, row)[:length] == [
                pytest.approx(1000 * row + slot + 0.1 * layer) for slot in slots
            ]


def test_a_path_that_lies_where_it_belongs_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RowCache(config())
    fill(cache, 0, 6, batch=2)
    monkeypatch.delattr(RowCache, "move_rows")
    assert cache.keep_paths([[0, 1, 2], [0]], [6, 6]) == [9, 7]
    assert cache.keep_paths([[0], []], [9, 3]) == [10, 3]


def test_each_row_moves_a_slot_of_its_own() -> None:
    cache = RowCache(config())
    fill(cache, 0, 8, batch=2)
    cache.move_rows(torch.tensor([[5], [7]]), torch.tensor([[3], [2]]))
    assert held(cache, row=0) == [0, 1, 2, 5, 4, 5, 6, 7]
    assert held(cache, row=1) == [1000, 1001, 1007, 1003, 1004, 1005, 1006, 1007]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("elsewhere", [0, 1], ids=["sources", "destinations"])
def test_indices_go_to_the_device_of_each_stack(batch: int, elsewhere: int) -> None:
    """A target may be spread over several. Numbers on torch's device without memory say so when
    they are sent for."""
    cache = RowCache(config())
    fill(cache, 0, 8, batch)
    indices = [torch.tensor([[5, 7]] * batch), torch.tensor([[3, 4]] * batch)]
    indices[elsewhere] = indices[elsewhere].to("meta")
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        cache.move_rows(*indices)


def indexed(layers: int = 2) -> RowCache:
    settings: dict[str, Any] = {"layer_types": ["indexed_attention"] * layers}
    return RowCache(LlamaConfig(num_hidden_layers=layers, **settings))


def fill_index(cache: RowCache, start: int, count: int, batch: int = 1) -> None:
    """Rows, and index keys of width 3, which some models write before and some behind them."""
    for layer in range(len(cache.layers)):
        new, index = rows(start, count, batch), rows(start, count, batch)[:, 0, :, :3]
        if layer:
            cache.update(new, -new, layer)
        keys = cache.update_indexer(index, layer)
        if not layer:
            cache.row_layers[0].indexer_position_ids = torch.cat(
                [torch.zeros(3, batch, start), index.permute(2, 0, 1)], dim=-1
            )
            cache.update(new, -new, layer)
        assert keys.shape == (batch, start + count, 3)


def held_index(cache: RowCache, row: int = 0, layer: int = 0) -> list[float]:
    numbers: list[float] = cache.row_layers[layer].idx_keys[row, 0, :, 0].tolist()
    return numbers


def test_index_keys_are_rows() -> None:
    cache = indexed()
    assert cache.keeps_index and not RowCache(config()).keeps_index
    fill_index(cache, 0, 6, batch=2)
    fill_index(cache, 6, 300, batch=2)  # which lets the stacks grow
    cache.set_length(6)
    fill_index(cache, 6, 4, batch=2)
    cache.move_rows(torch.tensor([[7, 9], [6, 7]]), torch.tensor([[6, 7], [4, 5]]))
    cache.set_length(8)
    for layer in (0, 1):
        assert held_index(cache, 0, layer) == held(cache, layer, 0) == [0, 1, 2, 3, 4, 5, 7, 9]
        assert held_index(cache, 1, layer)[:6] == [1000, 1001, 1002, 1003, 1006, 1007]
    cache.select_batch([1])
    assert held_index(cache)[:6] == held(cache)[:6] == [1000, 1001, 1002, 1003, 1006, 1007]
    positions_PBL = cache.row_layers[0].indexer_position_ids
    assert positions_PBL.shape == (3, 1, 8) and positions_PBL[2, 0, 4] == 1006
    assert [rows.shape[2] for rows in cache.row_layers[0].rows()] == [8] * 4
    cache.reset()
    assert cache.row_layers[0].indexer_position_ids is None
    fill_index(cache, 0, 3)
    assert held_index(cache, layer=1) == [0, 1, 2]
    taken = indexed()
    taken.take_over(cache)
    assert held_index(taken, layer=1) == held(taken, 1) == [0, 1, 2]


def test_one_tensor_for_keys_and_values_is_kept_once() -> None:
    cache = RowCache(config(layers=2))
    for layer in range(2):
        new = rows(0, 5)
        keys, values = cache.update(new, new, layer)
        assert torch.equal(keys, new) and torch.equal(values, new)
    assert [stack.shape[0] for stack in cache._stacks.stacks] == [2]
