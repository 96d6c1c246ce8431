"""The mask that a model is handed for a tree: its own rule, on positions in the text.

Shapes: B rows, N tree nodes, S cache slots, P nodes written before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from medusa_heads.target.attention import TreeMask, additive, tree_attention
from medusa_heads.target.graphs.static_cache import explicit_masks

# Within it, what is made without a word on where lies on another device than the tests' tensors.
ELSEWHERE = torch.device("meta")
LEAST = torch.finfo(torch.float32).min


def drawn(mask_BNS: Tensor) -> list[list[str]]:
    """`x` where a node may attend; whatever is neither 0 nor the least number is shown as `?`."""
    sign = {0.0: "x", LEAST: "."}
    return [
        ["".join(sign.get(number, "?") for number in row) for row in rows]
        for rows in mask_BNS.tolist()
    ]


def two_rows(**more: Any) -> TreeMask:
    """Five slots, then a root with two children. The second row has two slots of padding, two
    tokens, and a slot that the first row alone uses."""
    tree_NN = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    text_BS = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]]).bool()
    visible_BNS = torch.cat([text_BS[:, None].repeat(1, 3, 1), tree_NN.expand(2, 3, 3)], dim=2)
    return TreeMask(visible_BNS, torch.tensor([[5, 6, 6], [2, 3, 3]]), 5, **more)


def padded(**more: Any) -> TreeMask:
    return two_rows(padding_B=torch.tensor([0, 2]), **more)


def test_positions_of_slots_are_those_of_the_text() -> None:
    # Slot 4 of the second row holds nothing; that its number is 2 is of no account.
    assert padded().key_positions_BS.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 6],
        [-2, -1, 0, 1, 2, 2, 3, 3],
    ]
    assert two_rows().key_positions_BS.tolist()[1] == [0, 1, 2, 3, 4, 2, 3, 3]


def test_nodes_written_in_earlier_forwards_stand_where_the_tree_says() -> None:
    written_BP = torch.tensor([[9, 8], [7, 6]])
    assert padded(written_positions_BP=written_BP).key_positions_BS.tolist() == [
        [0, 1, 2, 9, 8, 5, 6, 6],
        [-2, -1, 0, 7, 6, 2, 3, 3],
    ]


def test_positions_reach_over_a_cache_that_is_longer_than_the_tree() -> None:
    mask = TreeMask(torch.ones(1, 2, 6).bool(), torch.tensor([[3, 4]]), 3)
    assert mask.key_positions_BS.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_causal_layer_sees_the_text_and_the_path() -> None:
    mask = explicit_masks(LlamaConfig(), padded(), torch.float32)
    assert isinstance(mask, Tensor) and mask.shape == (2, 1, 3, 8)
    assert drawn(mask[:, 0]) == [
        ["xxxxxx..", "xxxxxxx.", "xxxxxx.x"],
        ["..xx.x..", "..xx.xx.", "..xx.x.x"],
    ]


def test_a_window_is_one_of_the_text_and_not_of_the_cache() -> None:
    # Three tokens: a child at position 6 sees those at 4 and 5, in whatever slots they lie.
    tree = padded()
    with ELSEWHERE:
        mask = explicit_masks(MistralConfig(sliding_window=3), tree, torch.float32)
    assert isinstance(mask, Tensor)
    assert drawn(mask[:, 0]) == [
        ["...xxx..", "....xxx.", "....xx.x"],
        ["..xx.x..", "...x.xx.", "...x.x.x"],
    ]


def test_a_mask_of_numbers_that_is_at_hand_serves_causal_layers_alone() -> None:
    bias_BNS = torch.full((2, 3, 8), -7.0)
    tree = padded(bias_BNS=bias_BNS)
    causal = explicit_masks(LlamaConfig(), tree, torch.bfloat16)
    assert isinstance(causal, Tensor) and causal.dtype == torch.bfloat16
    assert causal.shape == (2, 1, 3, 8) and bool((causal == -7).all())
    window = explicit_masks(MistralConfig(sliding_window=3), tree, torch.float32)
    assert isinstance(window, Tensor) and not bool((window == -7).any())


def test_a_models_own_rule_is_asked_by_row_and_position() -> None:
    asked: dict[str, Tensor] = {}

    def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        asked.update(row=row, head=head, query=query, key=key)
        return (row + query + key) % 2 == 0

    tree = padded()
    with tree_attention(tree), ELSEWHERE:
        mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](mask_function=rule, dtype=torch.float64)
    assert mask.dtype == torch.float64
    assert {(each.dtype, each.device.type) for each in asked.values()} == {(torch.long, "cpu")}
    assert asked["row"].flatten().tolist() == [0, 1] and asked["head"].tolist() == [[[[0]]]]
    expected = [
        [
            "".join(
                "x" if visible and (row + query + key) % 2 == 0 else "."
                for visible, key in zip(of_node, keys, strict=True)
            )
            for of_node, query in zip(of_row, queries, strict=True)
        ]
        for row, (of_row, queries, keys) in enumerate(
            zip(
                padded().visible_BNS.tolist(),
                padded().query_positions_BN.tolist(),
                padded().key_positions_BS.tolist(),
                strict=True,
            )
        )
    ]
    least = torch.finfo(torch.float64).min
    assert drawn(mask[:, 0].where(mask[:, 0] > least, LEAST)) == expected


def test_numbers_of_a_mask_are_those_of_its_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        numbers = additive(torch.tensor([True, False]), dtype)
        assert numbers.dtype == dtype and numbers.tolist() == [0.0, torch.finfo(dtype).min]
