"""Trees that grow path by path: what begins alike is one node; the likeliest form a subtree."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_heads.prefix_tree import PrefixTree, to_token_tree

CHANCES = st.floats(0.01, 1.0)
PATHS = st.lists(st.lists(st.tuples(st.integers(0, 3), CHANCES), max_size=5), max_size=8)


def grown(paths: list[list[tuple[int, float]]]) -> PrefixTree:
    tree = PrefixTree(7)
    for path in paths:
        tree.add_path([token for token, _ in path], [chance for _, chance in path])
    return tree


def paths_of(tree: PrefixTree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        found.append((*found[tree.parents[node]], tree.tokens[node]))
    assert len(set(found)) == len(found)
    return set(found)


def test_shared_beginnings_are_one_node() -> None:
    tree = grown([[(1, 0.5), (2, 0.4)], [(1, 0.8), (3, 0.1)], [(4, 0.2)]])
    assert tree.tokens == [7, 1, 2, 3, 4]
    assert tree.parents == [-1, 0, 1, 1, 0]
    assert tree.depth == [0, 1, 2, 2, 1]
    assert tree.chances == [1.0, 0.8, 0.4, 0.1, 0.2]
    assert dict(tree.children(1)) == {2: 2, 3: 3}
    assert tree.only([1, 4]).tokens == [7, 1, 4]


@given(PATHS)
def test_holds_every_beginning_once(paths: list[list[tuple[int, float]]]) -> None:
    expected = {tuple(t for t, _ in path[:n]) for path in paths for n in range(len(path) + 1)}
    assert paths_of(grown(paths)) == expected | {()}


@given(PATHS, st.integers(0, 12))
def test_the_likeliest_nodes_are_a_subtree(paths: list[list[tuple[int, float]]], size: int) -> None:
    tree = grown(paths)
    order = tree.best_first()
    kept = tree.only(order[:size])
    assert len(kept) == 1 + min(size, len(tree) - 1)
    assert paths_of(kept) <= paths_of(tree)
    left_out = [tree.chances[node] for node in order[size:]]
    assert min(kept.chances[1:], default=1.0) >= max(left_out, default=0.0)


@given(st.lists(PATHS, min_size=1, max_size=3), st.integers(1, 9))
def test_rows_of_a_batch_get_one_size(
    batch: list[list[list[tuple[int, float]]]], at_least: int
) -> None:
    trees = [grown(paths) for paths in batch]
    tensors = to_token_tree(trees, torch.device("cpu"), at_least)
    assert tensors.num_nodes == max(at_least, *map(len, trees))
    for b, tree in enumerate(trees):
        tokens, parents = tensors.tokens_BN[b].tolist(), tensors.parents_BN[b].tolist()
        assert tokens[: len(tree)] == tree.tokens and parents[: len(tree)] == tree.parents
        for node, parent in enumerate(parents):
            seen = {node} | (set() if parent < 0 else _above(parents, parent))
            assert set(tensors.ancestors_BNN[b, node].nonzero().flatten().tolist()) == seen
            assert tensors.depth_BN[b, node] == len(seen) - 1
            if node >= len(tree) and parent >= 0:
                # A spare node stands behind its twin, which the walk finds first.
                assert (tokens[node], parent) in list(
                    zip(tokens[: len(tree)], parents[: len(tree)], strict=True)
                )


def _above(parents: list[int], node: int) -> set[int]:
    return {node} | (_above(parents, parents[node]) if parents[node] >= 0 else set())
