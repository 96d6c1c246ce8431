"""Trees on the host: any beginning of one is a subtree, and a batch of them has one size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_heads.trees.prefix_tree import PrefixTree, to_token_tree

# Of each node: which of those before it is its parent, and its chance.
NODES = st.lists(st.tuples(st.integers(0, 20), st.floats(0.01, 1.0)), max_size=10)


def grown(nodes: list[tuple[int, float]]) -> PrefixTree:
    tree = PrefixTree(7)
    for token, (parent, chance) in enumerate(nodes, start=100):
        tree.add(parent % len(tree), token, chance)
    return tree


def test_nodes_stand_in_the_order_in_which_they_were_added() -> None:
    tree = PrefixTree(7)
    first = tree.add(0, 1, 0.8)
    assert [tree.add(first, 2, 0.4), tree.add(0, 4, 0.2), tree.add(first, 3, 0.9)] == [2, 3, 4]
    assert tree.tokens == [7, 1, 2, 4, 3] and tree.parents == [-1, 0, 1, 0, 1]
    assert tree.depth == [0, 1, 2, 1, 2]
    assert tree.chances == [1.0, 0.8, 0.4, 0.2, 0.8]  # no likelier than its parent
    assert tree.expected == pytest.approx([0.0, 0.8, 1.2, 1.4, 2.0])  # depth 2: at most certain


def test_each_further_token_counts_less_than_the_one_before_it() -> None:
    tree = PrefixTree(7, further=0.5)
    for parent, chance in [(0, 0.8), (1, 0.4), (0, 0.2), (2, 0.3)]:
        tree.add(parent, 1, chance)
    assert tree.depth == [0, 1, 2, 1, 3]
    assert tree.nearer == pytest.approx([0.0, 0.8, 1.0, 1.2, 1.275])  # by depth 1, 1/2, 1/4


@settings(deadline=None)
@given(NODES)
def test_no_depth_promises_more_than_a_token(nodes: list[tuple[int, float]]) -> None:
    tree = grown(nodes)
    sums = tree.expected
    assert len(sums) == len(tree) and sums == sorted(sums)
    assert sums[-1] <= max(tree.depth) + 1e-9


@settings(deadline=None)
@given(st.lists(NODES, min_size=1, max_size=3), st.integers(0, 12), st.integers(1, 9))
def test_rows_of_a_batch_get_one_size(
    batch: list[list[tuple[int, float]]], drafted: int, at_least: int
) -> None:
    trees = [grown(nodes) for nodes in batch]
    tensors = to_token_tree(trees, torch.device("cpu"), drafted, at_least)
    longest = min(drafted + 1, max(map(len, trees)))
    nodes = tensors.num_nodes
    assert nodes == max(at_least, longest)
    assert tensors.ancestors_BNN.shape == (len(trees), nodes, nodes)
    for b, tree in enumerate(trees):
        own = min(len(tree), longest)
        tokens, parents = tensors.tokens_BN[b].tolist(), tensors.parents_BN[b].tolist()
        assert tokens[:own] == tree.tokens[:own] and parents[:own] == tree.parents[:own]
        for node, parent in enumerate(parents):
            seen = {node} | (set() if parent < 0 else _above(parents, parent))
            assert set(tensors.ancestors_BNN[b, node].nonzero().flatten().tolist()) == seen
            assert tensors.depth_BN[b, node] == len(seen) - 1
            if node >= own and parent >= 0:
                # A spare node stands behind its twin, which the walk finds first.
                assert (tokens[node], parent) in list(zip(tokens[:own], parents[:own], strict=True))


def _above(parents: list[int], node: int) -> set[int]:
    return {node} | (_above(parents, parents[node]) if parents[node] >= 0 else set())


def test_as_many_nodes_as_the_largest_tree_has() -> None:
    assert to_token_tree([PrefixTree(7)], torch.device("cpu")).num_nodes == 1
    batch = [PrefixTree(7), grown([(0, 0.5), (1, 0.5)])]
    tree = to_token_tree(batch, torch.device("cpu"))
    assert tree.num_nodes == 3 and tree.ancestors_BNN.dtype == torch.bool


def test_a_row_with_fewer_nodes_repeats_its_last() -> None:
    batch = [grown([(0, 0.5), (1, 0.5)]), grown([(0, 0.5)] * 4)]
    tree = to_token_tree(batch, torch.device("cpu"))
    assert tree.tokens_BN.tolist()[0] == [7, 100, 101, 101, 101]
    assert tree.parents_BN.tolist()[0] == [-1, 0, 1, 1, 1]


def test_a_tree_lies_where_it_is_wanted() -> None:
    tree = to_token_tree([grown([(0, 0.5)])], torch.device("meta"))
    tensors = (tree.tokens_BN, tree.parents_BN, tree.depth_BN, tree.ancestors_BNN)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
