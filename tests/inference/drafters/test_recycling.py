"""Successors that were seen lately, and what is learnt of how often they come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from medusa_heads.inference.drafters.recycling import RecycledTrees, RecyclingSource
from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.trees.tree import TokenTree, TreeShape


def test_recycled_tokens_are_learnt_from_as_they_were_drafted() -> None:
    """With the noise of the place where they were drafted, also when that has been written."""
    row = Row(0, 1, torch.tensor([1, 2]), StopCheck(StoppingCriteriaList()))
    state: Any = SimpleNamespace(rows=[row], drawing="keyed", noise=Noise(3, [row], [0]))
    logits_1NV = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    row.commit(5)
    offers = []
    for committed in ([], [6, 2]):
        source = RecyclingSource(8)
        source.observe(TokenTree.root_only(torch.tensor([5])), logits_1NV[:, :1])
        (drafted,) = source.draft(state)
        row.tokens += committed
        offers.append(drafted.offers(drafted.root))
    assert offers[1] == offers[0]


def test_trees_on_the_device_are_of_the_latest_successors() -> None:
    drafter, roots_B = RecycledTrees(10, 6), torch.tensor([3, 8])
    state: Any = SimpleNamespace(rows=[], noise=None, roots_B=roots_B)
    tree = TreeShape.from_choices([(0,)]).tree(torch.tensor([[3, 5]]))
    logits_BNV = torch.full((1, 2, 10), -9.0)
    logits_BNV[0, 0, [5, 6]] = torch.tensor([9.0, 8.0])  # behind 3: 5, then 6
    logits_BNV[0, 1, [3, 7]] = torch.tensor([9.0, 8.0])  # behind 5: 3, then 7
    drafter.observe(tree, -logits_BNV)  # seen before
    drafter.observe(tree, logits_BNV)
    drafted: Any = drafter.propose(state)
    paths = []
    for node in range(7):
        ancestors_N = drafted.ancestors_BNN[0, node].nonzero()[:, 0]
        paths.append(tuple(drafted.tokens_BN[0, ancestors_N].tolist()))
    # Likeliest first; of 6, which was never read, nothing is known.
    likely = {(3,), (3, 5), (3, 6), (3, 5, 3), (3, 5, 7), (3, 5, 3, 5), (3, 5, 3, 5, 3)}
    assert set(paths) == likely
    assert len(drafted.tokens_BN[1]) == 7 and drafter.levels == 6


@pytest.mark.parametrize("nodes", [0, 64])
def test_sizes_that_are_not_there(nodes: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 63 tokens, got {nodes}"):
        RecycledTrees(10, nodes)
