"""Token trees: the hand-drawn seven-node tree, and properties of every tree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_heads.config import RankPath
from medusa_heads.trees.tree import TokenTree, TreeShape, cartesian_choices

# The tree in the docstring of medusa_heads/trees/tree.py:
#   0:the --- 1:cat --- 3:sat --- 6:on
#         |         `-- 4:ran
#         `-- 2:dog --- 5:sat
SEVEN = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


def test_hand_drawn_tree() -> None:
    # Drawn in node order; from_choices would put the best chain first.
    shape = TreeShape(SEVEN)
    assert shape.parents == [-1, 0, 0, 1, 1, 2, 3]
    assert shape.depth == [0, 1, 1, 2, 2, 2, 3]
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 0, 1],
    ]
    assert torch.equal(shape.ancestors_NN, torch.tensor(expected, dtype=torch.bool))


def test_the_best_chain_comes_first() -> None:
    shape = TreeShape.from_choices(SEVEN)
    assert shape.choices == [(0,), (0, 0), (0, 0, 0), (1,), (0, 1), (1, 0)]
    assert shape.parents == [-1, 0, 1, 2, 0, 1, 4]


def test_tree_repeats_the_shape_in_every_row() -> None:
    tree = TreeShape.from_choices(SEVEN).tree(torch.arange(14).view(2, 7))
    assert tree.num_nodes == 7
    assert tree.parents_BN.tolist() == [[-1, 0, 1, 2, 0, 1, 4]] * 2
    assert torch.equal(tree.ancestors_BNN[0], tree.ancestors_BNN[1])


def test_root_only() -> None:
    tree = TokenTree.root_only(torch.tensor([5, 6]))
    assert tree.tokens_BN.tolist() == [[5], [6]]
    assert tree.parents_BN.tolist() == [[-1], [-1]]


def test_cartesian_choices() -> None:
    assert cartesian_choices([2, 1]) == [(0,), (1,), (0, 0), (1, 0)]
    assert len(cartesian_choices([3, 2, 2])) == 3 + 6 + 12


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([(0, 0)], "has no parent"),
        ([(0,), (0,)], "same path twice"),
        ([()], "non-empty"),
        ([(-1,)], "at least 0"),
    ],
)
def test_bad_choices_are_refused(choices: list[RankPath], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape.from_choices(choices)


def test_cartesian_refuses_zero_candidates() -> None:
    with pytest.raises(ValueError, match="at least 1 candidate"):
        cartesian_choices([2, 0])


@st.composite
def prefix_closed_paths(draw: st.DrawFn) -> list[RankPath]:
    paths = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)))
    closed = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    return draw(st.permutations(sorted(closed)))


@settings(deadline=None, max_examples=100)
@given(prefix_closed_paths())
def test_every_tree_is_well_formed(choices: list[RankPath]) -> None:
    shape = TreeShape.from_choices(choices)
    assert sorted(shape.choices) == sorted(choices)
    assert shape.parents[0] == -1 and shape.depth[0] == 0
    for node in range(1, shape.num_nodes):
        parent = shape.parents[node]
        assert 0 <= parent < node
        assert shape.depth[node] == shape.depth[parent] + 1
        own = set(shape.ancestors_NN[node].nonzero().flatten().tolist())
        inherited = set(shape.ancestors_NN[parent].nonzero().flatten().tolist())
        assert own == inherited | {node}
        assert len(own) == shape.depth[node] + 1


def test_spare_nodes_are_nobodys_children_and_see_themselves() -> None:
    shape = TreeShape([(0,), (1,), (0, 0)])
    tree = shape.tree(torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]]), torch.zeros(2, 4))
    assert tree.with_spare(4) is tree and tree.with_spare(3) is tree
    padded = tree.with_spare(6)
    assert padded.tokens_BN.tolist() == [[5, 6, 7, 8, 5, 5], [1, 2, 3, 4, 1, 1]]
    assert padded.parents_BN.tolist() == [[-1, 0, 0, 1, -1, -1]] * 2
    assert padded.depth_BN.tolist() == [[0, 1, 1, 2, 0, 0]] * 2
    assert torch.equal(padded.ancestors_BNN[:, :4, :4], tree.ancestors_BNN)
    alone = padded.ancestors_BNN.clone()
    alone[:, :4, :4] = False
    assert torch.equal(alone, torch.diag(torch.tensor([0, 0, 0, 0, 1, 1])).bool().expand(2, 6, 6))
    assert padded.log_probs_BN is not None and padded.log_probs_BN.shape == (2, 6)


def test_the_leading_chain_leaves_branches_and_spare_nodes_out() -> None:
    tokens_BN = torch.tensor([[7, 1, 2, 3, 4, 5, 6]])
    tree = TreeShape.from_choices(SEVEN).tree(tokens_BN, -tokens_BN.float())
    tree = TokenTree(**{**vars(tree), "drawn_from": {0: tokens_BN, 4: tokens_BN}})
    chain = tree.with_spare(9).leading_chains()
    assert chain.tokens_BN.tolist() == [[7, 1, 2, 3]] and chain.depth_BN.tolist() == [[0, 1, 2, 3]]
    assert torch.equal(chain.ancestors_BNN[0], torch.ones(4, 4).bool().tril())
    assert chain.log_probs_BN is not None and chain.log_probs_BN.tolist() == [[-7, -1, -2, -3]]
    assert list(chain.drawn_from) == [0]
    assert chain.leading_chains() is chain and chain.leading_chains([9]) is chain
    assert chain.leading_chains([2]).tokens_BN.tolist() == [[7, 1]]


def test_leading_chains_of_unlike_rows() -> None:
    tokens_BN = torch.tensor([[7, 1, 2, 3], [8, 4, 5, 6]])
    parents_BN = torch.tensor([[-1, 0, 1, 2], [-1, 0, 0, 2]])
    ancestors_BNN = torch.ones(2, 4, 4).bool().tril()
    tree = TokenTree(tokens_BN, parents_BN, parents_BN + 1, ancestors_BNN, -tokens_BN.float())
    assert tree.chain_lengths() == [4, 2]
    chains = tree.leading_chains([3, 9])
    assert chains.tokens_BN.tolist() == [[7, 1, 2], [8, 4, 8]]
    assert chains.parents_BN.tolist() == [[-1, 0, 1], [-1, 0, -1]]
    assert chains.depth_BN.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert chains.ancestors_BNN[1, 2].tolist() == [False, False, True]
    assert chains.log_probs_BN is not None and chains.log_probs_BN[1].tolist() == [-8, -4, -8]
    assert tree.leading_chains([1, 1]).tokens_BN.tolist() == [[7], [8]]
