"""What the nodes of a tree see: their own text, and their own path.

Shapes: B rows, N tree nodes, S cache slots.
"""

from __future__ import annotations

import pytest
import torch

from medusa_heads.target.attention import additive
from medusa_heads.trees.tree import TokenTree, TreeShape
from tests.inference.standing import ELSEWHERE, in_cache

FOUR = TreeShape([(0,), (1,), (0, 0)])
FOUR_DRAWN = ["x...", "xx..", "x.x.", "xx.x"]


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


def test_trees_of_many_sizes_take_the_memory_of_a_few() -> None:
    """At 64k tokens, buffers of all sizes up to 64 nodes would be 1.4 GB in fp32."""
    of, masks = in_cache([500], [0]), []
    chains = [TreeShape([(0,) * depth for depth in range(1, nodes)]) for nodes in range(1, 33)]
    for shape in (*chains, *reversed(chains)):
        masks.append(of.tree_mask(shape.tree(torch.zeros(1, shape.num_nodes).long())))
        assert drawn(masks[-1].visible_BNS)[0][-1] == "x" * (500 + shape.num_nodes)
    held = {m.visible_BNS.untyped_storage().data_ptr(): m.visible_BNS for m in masks}
    largest = 32 * 2 * (500 + 32)
    assert sum(of.untyped_storage().nbytes() for of in held.values()) <= 2 * largest


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
        for length, (shape, paths) in enumerate(shapes, start=5):
            of.lengths = [length] * batch
            mask = of.tree_mask(shape.tree(torch.zeros(batch, shape.num_nodes).long()))
            assert drawn(mask.visible_BNS) == [["x" * length + path for path in paths]] * batch
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
