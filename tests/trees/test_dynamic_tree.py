"""Dynamic trees: against exhaustive search, and every row's own."""

from __future__ import annotations

import heapq
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_heads.trees.dynamic_tree import (
    NEVER,
    Guess,
    Ranking,
    accepted_by_size,
    best_chain,
    best_first_tree,
    likeliest,
)
from medusa_heads.trees.on_host import best_first_on_host
from medusa_heads.trees.tree import TokenTree, chain_shape


def random_heads(
    batch: int, heads: int, ranks: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_BKV = torch.randn(batch, heads, 4 * ranks, generator=generator) * 2
    log_probs, tokens = logits_BKV.log_softmax(-1).topk(ranks, dim=-1)
    return tokens, log_probs


def independent(tokens_BKR: torch.Tensor, log_probs_BKR: torch.Tensor) -> Guess:
    """Heads that do not see the paths."""

    def guess(
        level: int, paths_BFJ: torch.Tensor, above_BF: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (-1, paths_BFJ.shape[1], -1)
        return tokens_BKR[:, level, None].expand(shape), log_probs_BKR[:, level, None].expand(shape)

    return guess


def paths(tree: TokenTree, row: int) -> set[tuple[int, ...]]:
    """Token paths of a row's nodes, checking that parents and mask agree on the way."""
    parents, tokens = tree.parents_BN[row].tolist(), tree.tokens_BN[row].tolist()
    found: list[tuple[int, ...]] = [()]
    ancestors: list[set[int]] = [{0}]
    for node in range(1, tree.num_nodes):
        assert 0 <= parents[node] < node
        found.append((*found[parents[node]], tokens[node]))
        ancestors.append(ancestors[parents[node]] | {node})
    for node, own in enumerate(ancestors):
        assert set(tree.ancestors_BNN[row, node].nonzero().flatten().tolist()) == own
        assert int(tree.depth_BN[row, node]) == len(own) - 1
    return set(found[1:])


def by_heap(tokens: torch.Tensor, log_probs: torch.Tensor, count: int) -> set[tuple[int, ...]]:
    """The textbook best-first search for one row."""
    heads, ranks = tokens.shape
    heap: list[tuple[float, tuple[int, ...]]]
    heap = [(-float(log_probs[0, r]), (r,)) for r in range(ranks)]
    heapq.heapify(heap)
    chosen: set[tuple[int, ...]] = set()
    while len(chosen) < count:
        score, path = heapq.heappop(heap)
        chosen.add(tuple(int(tokens[i, r]) for i, r in enumerate(path)))
        if len(path) < heads:
            for r in range(ranks):
                heapq.heappush(heap, (score - float(log_probs[len(path), r]), (*path, r)))
    return chosen


@settings(deadline=None, max_examples=60)
@given(
    heads=st.integers(1, 5),
    ranks=st.integers(2, 6),
    nodes=st.integers(1, 24),
    seed=st.integers(0, 99),
)
def test_equals_textbook_best_first_search(heads: int, ranks: int, nodes: int, seed: int) -> None:
    nodes = min(nodes, sum(ranks ** (level + 1) for level in range(heads)))
    tokens, log_probs = random_heads(3, heads, ranks, seed)
    roots_B, guess = torch.tensor([7, 8, 9]), independent(tokens, log_probs)
    for grow in (best_first_tree, best_first_on_host):
        tree = grow(roots_B, guess, nodes, heads)
        assert tree.tokens_BN[:, 0].tolist() == [7, 8, 9]
        assert tree.num_nodes == nodes + 1
        for row in range(3):
            assert paths(tree, row) == by_heap(tokens[row], log_probs[row], nodes)


@settings(deadline=None, max_examples=30)
@given(nodes=st.integers(1, 24), fewer=st.integers(0, 24), seed=st.integers(0, 99))
def test_the_likeliest_nodes_are_the_best_tree_of_their_number(
    nodes: int, fewer: int, seed: int
) -> None:
    fewer, roots_B = min(fewer, nodes), torch.tensor([7, 8, 9])
    guess = independent(*random_heads(3, 4, 4, seed))
    larger = (best_first_tree, best_first_on_host)[seed % 2](roots_B, guess, nodes, 4)
    tree, expected_BN = likeliest(larger, fewer + 1)
    for size in range(nodes + 1):
        alone = best_first_tree(roots_B, guess, size, 4)
        assert alone.ranked is not None
        chances_BN = alone.ranked.scores_BN.exp()
        assert expected_BN[:, size].tolist() == pytest.approx((chances_BN.sum(1) - 1.0).tolist())
    if not fewer:
        assert tree.tokens_BN.tolist() == [[7], [8], [9]]
        return
    own = best_first_tree(roots_B, guess, fewer, 4)
    for row in range(3):
        assert paths(tree, row) == paths(own, row)


@settings(deadline=None, max_examples=50)
@given(
    chances=st.lists(
        st.sampled_from([0.0, -1e-8, -1e-7, -3e-6, -0.3, -40.0, NEVER]), min_size=12, max_size=12
    ),
    nodes=st.integers(1, 24),
)
def test_the_likeliest_nodes_have_their_parents(chances: list[float], nodes: int) -> None:
    """However sure what stands behind what is unlikely, and however it is rounded."""
    log_probs_BKR = torch.tensor(chances).view(1, 4, 3).sort(dim=-1, descending=True).values
    guess = independent(torch.arange(12).view(1, 4, 3), log_probs_BKR)
    for grow in (best_first_tree, best_first_on_host):
        tree = grow(torch.tensor([99]), guess, nodes, 4)
        whole = paths(tree, 0)
        for size in range(nodes + 1):
            smaller, expected_BN = likeliest(tree, size + 1)
            own = paths(smaller, 0)
            assert len(own) == size and own <= whole
            assert torch.all(expected_BN.diff() >= 0) and expected_BN[0, 0] == 0


def test_a_chain_is_the_likeliest_path_of_its_length() -> None:
    tokens, log_probs = random_heads(3, 4, 5, seed=2)
    log_probs[1, 2, 0] = math.nan  # no number, so not the likeliest
    chain = best_chain(torch.tensor([7, 8, 9]), independent(tokens, log_probs), chain_shape(5))
    best = log_probs.nan_to_num(nan=-math.inf).argmax(dim=-1, keepdim=True)
    assert chain.chain_lengths() == [5, 5, 5] and chain.tokens_BN[:, 0].tolist() == [7, 8, 9]
    assert torch.equal(chain.tokens_BN[:, 1:], tokens.gather(2, best)[..., 0])
    assert chain.log_probs_BN is not None
    assert torch.equal(chain.log_probs_BN[:, 1:], log_probs.gather(2, best)[..., 0])


def test_certain_heads_draft_a_chain_with_parents_first() -> None:
    tokens = torch.arange(12).view(1, 4, 3)
    log_probs = torch.tensor([0.0, -50.0, -60.0]).expand(1, 4, 3)
    tree = best_first_tree(torch.tensor([99]), independent(tokens, log_probs), 4, 4)
    assert tree.tokens_BN.tolist() == [[99, 0, 3, 6, 9]]
    assert tree.parents_BN.tolist() == [[-1, 0, 1, 2, 3]]


def test_accepted_nodes_of_every_size_match_a_walk_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_SKV = torch.randn(50, 3, 6, generator=generator) * 2
    log_probs_SKR, tokens_SKR = logits_SKV.log_softmax(-1).topk(5, dim=-1)
    true_SK = torch.randint(0, 6, (50, 3), generator=generator)
    roots_S = torch.zeros(50, dtype=torch.long)
    guess = independent(tokens_SKR, log_probs_SKR)
    sizes = (1, 4, 12, 30)
    largest = best_first_tree(roots_S, guess, sizes[-1], 3)
    by_hand = []
    for size in sizes:
        tree = best_first_tree(roots_S, guess, size, 3)
        by_hand.append(sum(walk(tree, s, true_SK[s].tolist()) for s in range(50)))
    assert accepted_by_size(largest, true_SK, sizes) == by_hand


def walk(tree: TokenTree, row: int, true: list[int]) -> int:
    """How many tokens a row's tree has along the truth."""
    node = accepted = 0
    for token in true:
        children = [
            child
            for child in range(1, tree.num_nodes)
            if tree.parents_BN[row, child] == node and tree.tokens_BN[row, child] == token
        ]
        if not children:
            break
        node = children[0]
        accepted += 1
    return accepted


@pytest.mark.parametrize("first", [0.0, -20.0, -60.0, -math.inf, math.nan])
@pytest.mark.parametrize("later", [0.0, -1.0, -math.inf, math.nan])
@pytest.mark.parametrize("nodes", [3, 15, 40])
def test_no_node_stands_without_its_parent(first: float, later: float, nodes: int) -> None:
    """Whatever heads say: of certainties behind what is unlikely, and of no numbers at all."""
    tokens_BKR = torch.arange(48).view(1, 3, 16)
    log_probs_BKR = torch.tensor([first, later, later])[None, :, None].expand(1, 3, 16)
    for grow in (best_first_tree, best_first_on_host):
        tree = grow(torch.tensor([7]), independent(tokens_BKR, log_probs_BKR), nodes, 3)
        assert tree.tokens_BN[0, 0] == 7 and len(paths(tree, 0)) == nodes


def test_a_ranking_counts_in_fp32_whatever_numbers_are_made_of() -> None:
    logits_BKV = torch.randn(1, 2, 9, generator=torch.Generator().manual_seed(0))
    heads: Any = SimpleNamespace(token_ids=lambda ids: ids)
    _, expected = Ranking(heads, [0.7, 0.9]).best(logits_BKV, 3)
    torch.set_default_dtype(torch.float16)
    try:
        _, made = Ranking(heads, [0.7, 0.9]).best(logits_BKV, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(made, expected)


@pytest.mark.parametrize("width", [None, 3])
def test_paths_without_hope_are_not_asked(width: int | None) -> None:
    tokens_BKR, log_probs_BKR = random_heads(2, 5, 6, seed=1)
    log_probs_BKR[:, 3:] -= 9.0
    asked: list[int] = []

    def guess(level: int, *paths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(paths[0].shape[1])
        return independent(tokens_BKR, log_probs_BKR)(level, *paths)

    roots_B = torch.tensor([7, 8])
    few = best_first_on_host(roots_B, guess, 6, 5, width)
    assert len(asked) == 4 and sum(asked) < 1 + 3 * (width or 6)
    asked.clear()
    every = best_first_tree(roots_B, guess, 6, 5, width)
    assert asked == [1, *[width or 6] * 4]
    for name in ("tokens_BN", "parents_BN", "depth_BN", "ancestors_BNN", "log_probs_BN", "ranked"):
        for one, other in zip(getattr(few, name), getattr(every, name), strict=True):
            assert torch.equal(one, other)


def test_a_tree_of_many_nodes_on_the_host() -> None:
    """More than a word has bits for."""
    roots_B, guess = torch.tensor([7, 8]), independent(*random_heads(2, 4, 6, seed=3))
    for nodes in (62, 63, 64, 200):
        one, other = (
            grow(roots_B, guess, nodes, 4) for grow in (best_first_tree, best_first_on_host)
        )
        assert torch.equal(one.ancestors_BNN, other.ancestors_BNN)
        assert torch.equal(one.tokens_BN, other.tokens_BN)
