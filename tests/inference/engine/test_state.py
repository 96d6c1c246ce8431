"""What decoding keeps between two steps, and what the nodes of a tree see of it.

Shapes: B rows, T tokens, N tree nodes, D hidden.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MaxLengthCriteria, StoppingCriteriaList

from medusa_heads.inference.engine.decoding import _finish_step
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.attention import additive
from medusa_heads.target.cache import RowCache
from medusa_heads.trees.tree import TokenTree, TreeShape
from tests.allocations import Allocations

BATCH, NODES, HIDDEN = 3, 64, 32
# Within it, what is made without a word on where lies on another device than the tests' tensors.
ELSEWHERE = torch.device("meta")


def state(*, keeps_fresh: bool = True) -> DecodingState:
    stop = StopCheck(StoppingCriteriaList())
    rows = [Row(i, BATCH, torch.arange(1, 9), stop) for i in range(BATCH)]
    config = LlamaConfig(num_hidden_layers=1)
    return DecodingState(rows, RowCache(config), [0] * BATCH, keeps_fresh=keeps_fresh)


def step(of: DecodingState, number: int, paths: list[list[int]]) -> None:
    """Every hidden state names its step, row and node."""
    for row, path in zip(of.rows, paths, strict=True):
        for _ in path:
            row.commit(1)
    place_BN1 = 100 * torch.arange(BATCH)[:, None, None] + torch.arange(NODES)[:, None]
    of.advance((1000.0 * number + place_BN1).repeat(1, 1, HIDDEN), paths)


def test_hidden_states_of_accepted_nodes_wait_in_order() -> None:
    paths = [[0, 3, 9], [0], [0, 7]], [[0], [0, 1], [0, 5, 6, 8]]
    of = state()
    of.take_prompt(torch.zeros(BATCH, 8, HIDDEN))
    of.fresh()
    for number, each in enumerate(paths, start=1):
        step(of, number, each)
        assert of.hidden_BD[:, 0].tolist() == [
            1000 * number + 100 * row + path[-1] for row, path in enumerate(each)
        ]
    hidden_BAD, nodes = of.fresh()
    for row in range(BATCH):
        expected = [
            1000 * n + 100 * row + node for n, each in enumerate(paths, 1) for node in each[row]
        ]
        assert hidden_BAD[row, nodes[row], 0].tolist() == expected


@pytest.mark.parametrize(("keeps_fresh", "waiting"), [(True, 20 * 2), (False, 2)])
def test_trees_that_heads_were_not_asked_after_are_not_kept(
    keeps_fresh: bool, waiting: int
) -> None:
    of = state(keeps_fresh=keeps_fresh)
    with Allocations() as allocations:
        for number in range(20):
            step(of, number, [[0, 5], [0], [0, 2]])
    of_a_node = HIDDEN * torch.float32.itemsize
    state_and_roots = BATCH * (of_a_node + torch.int64.itemsize)
    assert allocations.live() <= BATCH * waiting * of_a_node + state_and_roots


#   0 --- 1 --- 3
#   `---- 2
FOUR = TreeShape([(0,), (1,), (0, 0)])
FOUR_DRAWN = ["x...", "xx..", "x.x.", "xx.x"]


def rows_of(lengths: list[int], criteria: StoppingCriteriaList | None = None) -> list[Row]:
    """Rows of so many tokens, padding included: a prompt of two, the others committed, 1, 2, .."""
    stop = StopCheck(criteria or StoppingCriteriaList(), len(lengths))
    rows = [Row(i, len(lengths), torch.tensor([7, 7]), stop) for i in range(len(lengths))]
    for row, length in zip(rows, lengths, strict=True):
        for token in range(1, length - 1):
            row.commit(token)
    return rows


def in_cache(
    lengths: list[int], padding: list[int], max_length: int | None = None, slots: int | None = None
) -> DecodingState:
    cache = RowCache(LlamaConfig(num_hidden_layers=1))
    cache.fixed_capacity = slots
    numbers_BT = torch.arange(40.0) + 1000 * torch.arange(len(lengths))[:, None]
    rows_B1TX = numbers_BT[:, None, :, None].expand(-1, 1, -1, 2)
    cache.update(rows_B1TX, -rows_B1TX, 0)
    of = DecodingState(rows_of(lengths), cache, padding, max_length)
    of.hidden_BD = torch.zeros(len(lengths), HIDDEN, dtype=torch.float64)
    return of


def four(batch: int) -> TokenTree:
    return FOUR.tree(torch.zeros(batch, 4, dtype=torch.long))


def drawn(visible_BNS: torch.Tensor) -> list[list[str]]:
    return [["".join(".x"[seen] for seen in node) for node in row] for row in visible_BNS.tolist()]


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_in_step_see_their_text_and_the_path_of_each_node(batch: int) -> None:
    of = in_cache([5] * batch, [0] * batch)
    for length in (5, 6, 9, 15, 16, 40, 41):
        of.lengths = [length] * batch
        tree = four(batch)
        with ELSEWHERE:
            mask = of.tree_mask(tree)
        assert of.cache.get_seq_length() == mask.first_slot == length
        assert drawn(mask.visible_BNS) == [["x" * length + path for path in FOUR_DRAWN]] * batch
        positions = [length, length + 1, length + 1, length + 2]
        assert mask.query_positions_BN.tolist() == [positions] * batch
        assert mask.padding_B is None and mask.bias_BNS is not None
        assert torch.equal(mask.bias_BNS, additive(mask.visible_BNS, torch.float64))


def test_masks_of_rows_in_step_are_made_once_for_many_steps() -> None:
    of = in_cache([5], [0])
    masks = []
    for length in (5, 9, 14):  # twice (5 + 4) slots are held
        of.lengths = [length]
        masks.append(of.tree_mask(four(1)))
    for tensors in ([m.visible_BNS for m in masks], [m.bias_BNS for m in masks]):
        assert len({t.untyped_storage().data_ptr() for t in tensors if t is not None}) == 1


def test_where_kernels_want_an_aligned_beginning_the_numbers_are_a_copy() -> None:
    of = in_cache([5], [0])
    bias_BNS = of.tree_mask(FOUR.tree(torch.zeros(1, 4, device="meta").long())).bias_BNS
    assert bias_BNS is not None and bias_BNS.shape == (1, 4, 9)
    assert bias_BNS.storage_offset() == 0 and bias_BNS.is_contiguous()


def test_trees_of_one_size_and_of_others_have_masks_of_their_own() -> None:
    chain, pair = TreeShape([(0,), (0, 0), (0, 0, 0)]), TreeShape([(0,)])
    shapes = [
        (FOUR, FOUR_DRAWN),
        (pair, ["x.", "xx"]),
        (TreeShape([]), ["x"]),
        (chain, ["x...", "xx..", "xxx.", "xxxx"]),
        (FOUR, FOUR_DRAWN),
    ]
    for batch in (2, 1):
        of = in_cache([5] * batch, [0] * batch)
        for shape, paths in shapes:
            mask = of.tree_mask(shape.tree(torch.zeros(batch, shape.num_nodes).long()))
            assert drawn(mask.visible_BNS) == [["xxxxx" + path for path in paths]] * batch
            assert mask.bias_BNS is not None
            assert torch.equal(mask.bias_BNS, additive(mask.visible_BNS, torch.float64))


def test_a_batch_that_rows_leave_has_masks_of_its_own() -> None:
    of = in_cache([5, 5], [0, 0])
    assert of.tree_mask(four(2)).visible_BNS.shape[0] == 2
    of.lengths, of.padding = [5], [0]
    assert of.tree_mask(four(1)).visible_BNS.shape[0] == 1


def test_rows_of_a_batch_see_neither_padding_nor_slots_of_longer_rows() -> None:
    of, tree = in_cache([6, 4], [0, 2]), four(2)
    with ELSEWHERE:
        mask = of.tree_mask(tree)
    assert of.cache.get_seq_length() == mask.first_slot == 6
    assert drawn(mask.visible_BNS) == [
        ["xxxxxx" + path for path in FOUR_DRAWN],
        ["..xx.." + path for path in FOUR_DRAWN],
    ]
    assert mask.query_positions_BN.tolist() == [[6, 7, 7, 8], [2, 3, 3, 4]]
    assert mask.padding_B is not None and mask.padding_B.tolist() == [0, 2]


def test_a_mask_lies_where_the_tree_does() -> None:
    of = in_cache([6, 4], [0, 2])
    mask = of.tree_mask(FOUR.tree(torch.zeros(2, 4, device="meta").long()))
    for tensor in (mask.visible_BNS, mask.query_positions_BN, mask.padding_B):
        assert tensor is not None and tensor.device.type == "meta"


def test_rows_of_one_length_with_padding() -> None:
    mask = in_cache([6, 6], [0, 2]).tree_mask(four(2))
    assert drawn(mask.visible_BNS) == [
        ["xxxxxx" + path for path in FOUR_DRAWN],
        ["..xxxx" + path for path in FOUR_DRAWN],
    ]
    assert mask.query_positions_BN.tolist() == [[6, 7, 7, 8], [4, 5, 5, 6]]


def test_rows_of_unlike_length_without_padding() -> None:
    mask = in_cache([4, 6], [0, 0]).tree_mask(four(2))
    assert drawn(mask.visible_BNS) == [
        ["xxxx.." + path for path in FOUR_DRAWN],
        ["xxxxxx" + path for path in FOUR_DRAWN],
    ]
    assert mask.query_positions_BN.tolist() == [[4, 5, 5, 6], [6, 7, 7, 8]]


def test_one_row_with_padding() -> None:
    mask = in_cache([6], [2]).tree_mask(four(1))
    assert drawn(mask.visible_BNS) == [["..xxxx" + path for path in FOUR_DRAWN]]
    assert mask.query_positions_BN.tolist() == [[4, 5, 5, 6]]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_cache_of_fixed_size_is_masked_as_a_whole(batch: int) -> None:
    mask = in_cache([6, 4][:batch], [0, 2][:batch], slots=13).tree_mask(four(batch))
    assert (
        drawn(mask.visible_BNS)
        == [
            ["xxxxxx" + path + "..." for path in FOUR_DRAWN],
            ["..xx.." + path + "..." for path in FOUR_DRAWN],
        ][:batch]
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_no_node_stands_behind_the_last_position(batch: int) -> None:
    of = in_cache([6, 4][:batch], [0, 2][:batch], max_length=8)
    # The padded row's last position is nearer: a text of 8 slots has 6 tokens there.
    assert (
        of.tree_mask(four(batch)).query_positions_BN.tolist()
        == [[6, 7, 7, 7], [2, 3, 3, 4]][:batch]
    )
    of = in_cache([8, 8][:batch], [0, 2][:batch], max_length=8)
    assert of.tree_mask(four(batch)).query_positions_BN.tolist() == [[7] * 4, [5] * 4][:batch]


@pytest.mark.parametrize("width", [HIDDEN, 1])
def test_a_step_leaves_the_state_of_each_rows_last_accepted_node(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(RowCache, "select_batch")  # nobody leaves: the cache is not copied
    of = in_cache([6, 4, 5], [0, 2, 1])
    paths = [[0, 1, 3], [0], [0, 2]]
    for row, path in zip(of.rows, paths, strict=True):
        for node in path:
            row.commit(50 + node)
    hidden_BND = place_of_nodes(3)[..., :width]
    with ELSEWHERE:
        of.keep(paths)
        of.advance(hidden_BND, paths)
    assert of.lengths == [9, 5, 7] and of.padding == [0, 2, 1]
    assert of.hidden_BD[:, 0].tolist() == [3, 100, 202] and of.hidden_BD.is_contiguous()
    assert of.roots_B.tolist() == [53, 50, 52]
    assert [row.index for row in of.rows] == [0, 1, 2]


def place_of_nodes(batch: int) -> torch.Tensor:
    """Hidden states [B, N, D] that name row and node."""
    place_BN1 = 100 * torch.arange(batch)[:, None, None] + torch.arange(NODES)[:, None]
    return place_BN1.repeat(1, 1, HIDDEN).double()


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_step_that_accepts_no_draft_leaves_the_state_of_the_root(nodes: int) -> None:
    of = in_cache([6, 4, 5], [0, 2, 1])
    for row in of.rows:
        row.commit(50 + row.index)
    of.rows[1].done = True
    of.keep([[0], [0], [0]])
    of.advance(place_of_nodes(3)[:, :nodes], [[0], [0], [0]])
    assert of.lengths == [7, 6] and of.roots_B.tolist() == [50, 52]
    assert of.hidden_BD[:, 0].tolist() == [0, 200]


@pytest.mark.parametrize("slots", [None, 40])
def test_rows_that_have_ended_leave(slots: int | None) -> None:
    """From a cache of fixed size they leave together."""
    of = in_cache([6, 4, 5, 6], [0, 2, 1, 3], slots=slots)
    of.take_prompt(place_of_nodes(4))
    of.fresh()
    paths = [[0, 1, 3], [0, 2], [0, 2], [0]]
    for row, path in zip(of.rows, paths, strict=True):
        for node in path:
            row.commit(50 + node)
    of.rows[0].done = of.rows[2].done = True
    hidden_BND = place_of_nodes(4)
    with ELSEWHERE:
        of.keep(paths)
        of.advance(hidden_BND, paths)
    left = [1, 3] if slots is None else [0, 1, 2, 3]
    assert [row.index for row in of.rows] == left
    assert of.lengths == [[9, 6, 7, 7][row] for row in left]
    assert of.padding == [[0, 2, 1, 3][row] for row in left]
    assert of.hidden_BD[:, 0].tolist() == [[3, 102, 202, 300][row] for row in left]
    assert of.roots_B.tolist() == [[53, 52, 52, 50][row] for row in left]
    hidden_BAD, nodes = of.fresh()
    assert [hidden_BAD[b, nodes[b], 0].tolist() for b in range(len(left))] == [
        [[0, 1, 3], [100, 102], [200, 202], [300]][row] for row in left
    ]
    keys = of.cache.row_layers[0].keys
    assert keys is not None and keys.shape[0] == len(left)
    assert [keys[b, 0, 0, 0].item() // 1000 for b in range(len(left))] == left
    # A row that stays has no path any more once it has ended; the others go on.
    paths = [[0, 3] if row in (1, 3) else [] for row in left]
    for row, path in zip(of.rows, paths, strict=True):
        for node in path:
            row.commit(60 + node)
            row.done = row.index == 3 and node == 3
    of.keep(paths)
    of.advance(place_of_nodes(len(left)), paths)
    assert of.rows[0].index == left[0] and len(of.rows) == (1 if slots is None else 4)
    place = left.index(1) if slots else 0
    assert of.roots_B[place] == 63 and of.hidden_BD[place, 0] == 100 * left.index(1) + 3
    for row in of.rows:
        row.done = True
    of.advance(place_of_nodes(len(of.rows)), [[] for _ in of.rows])
    assert of.rows == []


class Heard:
    """A streamer that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.told.append(value.tolist())

    def end_step(self) -> None:
        self.told.append("step")


def test_a_token_is_committed_told_and_asked_about_once() -> None:
    heard = Heard()
    criteria = StoppingCriteriaList([MaxLengthCriteria(4)])
    row = Row(0, 1, torch.tensor([7, 7]), StopCheck(criteria), heard)
    assert row.commit(5) is False and not row.done
    assert row.commit(6) is True and row.done
    assert row.tokens == [5, 6] and heard.told == [[5], [6]]
    with pytest.raises(AssertionError):
        row.commit(7)


def test_a_step_is_counted_for_the_rows_that_took_part() -> None:
    of = in_cache([6, 4, 5], [0, 0, 0], slots=40)
    streamers = [Heard() for _ in of.rows]
    for row, heard in zip(of.rows, streamers, strict=True):
        row._streamer = heard
    of.rows[1].done = True
    for node in (0, 1):
        of.rows[0].commit(node)
    of.rows[2].commit(0)
    stats = GenerationStats()
    _finish_step(of, [[0, 1], [], [0]], place_of_nodes(3), stats)
    assert (stats.steps, stats.forwards, dict(stats.accepted)) == (2, 1, {1: 1, 0: 1})
    _finish_step(of, [[0, 1], [], [0]], place_of_nodes(3), stats)
    assert (stats.steps, stats.forwards, dict(stats.accepted)) == (4, 2, {1: 2, 0: 2})
    assert [heard.told for heard in streamers] == [
        [[0], [1], "step", "step"],
        [],
        [[0], "step", "step"],
    ]
    assert of.hidden_BD[:, 0].tolist() == [1, 100, 200]
