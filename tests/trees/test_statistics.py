"""Head statistics: counts, the trees they imply, simulated decoding."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_heads.trees.statistics import (
    MAX_NODES,
    MAX_RANK,
    HeadStatistics,
    prior_statistics,
    simulate_tokens_per_step,
)
from medusa_heads.trees.tree import TreeShape

RANKS = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0], [7, 0], [0, 99], [-100, 0]])


def test_counts_by_hand() -> None:
    measured = HeadStatistics.from_ranks(RANKS)
    assert measured.positions == 6  # the last position has no true token for head 0
    assert dict(measured.paths)[(0,)] == 4
    assert dict(measured.paths)[(0, 0)] == 2
    assert measured.choices(2) == [(0,), (0, 0)]
    assert measured.top_k_accuracy(1) == [4 / 6, 4 / 6]
    assert measured.top_k_accuracy(2) == [5 / 6, 5 / 6]
    assert measured.expected_tokens_per_step(2) == pytest.approx(1 + (4 + 2) / 6)


def test_round_trip_and_damage() -> None:
    measured = HeadStatistics.from_ranks(RANKS)
    assert HeadStatistics.from_dict(measured.to_dict()).paths == measured.paths
    with pytest.raises(ValueError, match="without its parent"):
        HeadStatistics.from_dict(measured.to_dict() | {"paths": [[[0, 0], 3]]})
    with pytest.raises(ValueError, match="positions to be an integer"):
        HeadStatistics.from_dict({"num_heads": 2})


@pytest.mark.parametrize(
    ("part", "value", "why"),
    [
        ("positions", 3, "rise to at most the 3 positions"),
        ("top_k_hits", [[5] * 15 + [4], [4] * 16], "rise to at most the 6 positions"),
        ("paths", [[[0], 7]], r"count the path \[0\] more often"),
        ("paths", [[[0], 4], [[0, 0], 5]], r"count the path \[0, 0\] more often"),
        ("temperatures", [1, 10**400], "one temperature above 0"),
        *(
            ("dynamic_tokens_per_step", wrong, "dynamic_tokens_per_step")
            for wrong in (5, "x", [1], {"16": float("nan")}, {"16": 0.5}, {"16": 10**400})
        ),
        *(
            ("dynamic_tokens_per_step", {wrong: 2.0}, "by numbers of nodes")
            for wrong in ("x", "", "-1", "1.5", "9" * 5_000)
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_statistics_that_contradict_themselves(part: str, value: object, why: str) -> None:
    whole = HeadStatistics.from_ranks(RANKS).to_dict()
    assert HeadStatistics.from_dict(whole).to_dict() == whole
    with pytest.raises(ValueError, match=why):
        HeadStatistics.from_dict(whole | {part: value})


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one position"):
        HeadStatistics.from_ranks(torch.full((3, 2), -100))


def test_simulation_by_hand() -> None:
    # With the tree {(0,), (0, 0)}: position 0 accepts two drafts and moves on by three, to a
    # position whose first head misses, which commits one token.
    ranks_BTK = torch.tensor([[[0, 0], [9, 9], [9, 9], [5, 0]]])
    assert simulate_tokens_per_step(ranks_BTK, [(0,), (0, 0)]) == (3 + 1) / 2
    assert simulate_tokens_per_step(ranks_BTK[:0], [(0,)]) == 0.0


@st.composite
def measured_ranks(draw: st.DrawFn) -> Tensor:
    """Few ranks, so that paths repeat; -100 where there is no true token, and ranks beyond all."""
    B, T, K = draw(st.integers(1, 4)), draw(st.integers(1, 40)), draw(st.integers(1, 6))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    some = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 4, 7, 15, 16, 99, -100])
    chosen = some[: draw(st.integers(1, len(some)))]
    ranks_BTK = chosen[torch.randint(len(chosen), (B, T, K), generator=random)]
    ranks_BTK[:, torch.randint(T, (draw(st.integers(0, 3)),), generator=random)] = -100
    return ranks_BTK.to(draw(st.sampled_from([torch.int8, torch.long])))


@settings(deadline=None, max_examples=80, derandomize=True)
@given(measured_ranks(), st.integers(1, 64))
def test_counted_in_arrays_as_position_by_position(ranks_BTK: Tensor, num_nodes: int) -> None:
    sequences = ranks_BTK.tolist()
    complete = [ranks for ranks in itertools.chain(*sequences) if min(ranks) >= 0]
    if not complete:
        assert simulate_tokens_per_step(ranks_BTK, [(0,)]) == 0
        return
    counts = Counter(
        tuple(ranks[:end])
        for ranks in complete
        for end in range(1, len(ranks) + 1)
        if max(ranks[:end]) < MAX_RANK
    )
    measured = HeadStatistics.from_ranks(ranks_BTK.flatten(0, 1))
    assert measured.positions == len(complete)
    assert measured.top_k_hits == [
        [sum(rank < k for rank in of_head) for k in range(1, MAX_RANK + 1)]
        for of_head in zip(*complete, strict=True)
    ]
    ordered = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    assert measured.paths == ordered[:MAX_NODES]

    tree, steps, tokens = set(measured.choices(num_nodes)), 0, 0
    for sequence in sequences:
        t, known = 0, [min(ranks) >= 0 for ranks in sequence]
        while t < len(sequence):
            if not known[t]:
                t += 1
                continue
            lengths = range(1, len(sequence[t]) + 1)
            accepted = sum(tuple(sequence[t][:end]) in tree for end in lengths)
            steps, tokens = steps + 1, tokens + accepted + 1
            end = known.index(False, t) if False in known[t:] else len(known)
            t = min(t + accepted + 1, end)  # a step ends with its stretch
    assert simulate_tokens_per_step(ranks_BTK, measured.choices(num_nodes)) == tokens / steps


@pytest.mark.parametrize("num_heads", [1, 3, 4, 10])
def test_a_prior_is_a_tree_that_branches_and_declines(num_heads: int) -> None:
    prior = prior_statistics(num_heads)
    assert HeadStatistics.from_dict(prior.to_dict()).paths == prior.paths  # each after its parent
    counts = dict(prior.paths)
    assert all(count <= counts.get(path[:-1], prior.positions) for path, count in prior.paths)
    assert [count for _, count in prior.paths] == sorted(counts.values(), reverse=True)
    top_1 = prior.top_k_accuracy(1)
    assert top_1 == sorted(set(top_1), reverse=True)
    for hits in prior.top_k_hits:
        assert hits == sorted(hits) and hits[-1] < prior.positions
    assert 0 < len(prior.paths) <= MAX_NODES
    assert prior.positions < 1000


def test_a_prior_of_four_heads_expects_what_such_heads_are_known_for() -> None:
    prior = prior_statistics(4)
    assert prior.choices(7) == [(0,), (0, 0), (0, 0, 0), (1,), (0, 1), (1, 0), (0, 0, 1)]
    assert len(prior.choices(63)) == 63
    assert prior.expected_tokens_per_step(7) == pytest.approx(2.25, abs=0.02)
    assert prior.expected_tokens_per_step(63) == pytest.approx(2.84, abs=0.05)


def test_a_prior_names_no_candidate_that_a_head_lacks() -> None:
    prior = prior_statistics(3, num_candidates=2)
    assert {rank for path, _ in prior.paths for rank in path} == {0, 1}
    assert len(prior.paths) <= 2 + 4 + 8
    assert max(rank for path, _ in prior_statistics(2).paths for rank in path) < MAX_RANK
    with pytest.raises(ValueError, match="at least one head and one candidate"):
        prior_statistics(0)


@st.composite
def rank_tables(draw: st.DrawFn) -> Tensor:
    heads = draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 3), min_size=heads, max_size=heads)
    return torch.tensor(draw(st.lists(row, min_size=1, max_size=5)))  # few enough to try all trees


@settings(deadline=None, max_examples=60)
@given(rank_tables(), st.integers(1, 4))
def test_chosen_tree_is_the_best_of_its_size(ranks_SK: Tensor, num_nodes: int) -> None:
    """Against every tree of that size: none accepts more on the measured positions."""
    measured = HeadStatistics.from_ranks(ranks_SK)
    chosen = measured.choices(num_nodes)
    TreeShape.from_choices(chosen)  # raises unless it is a tree
    rows = [tuple(row) for row in ranks_SK.tolist()]

    def accepted(tree: tuple[tuple[int, ...], ...]) -> int:
        return sum(row[: len(path)] == path for path in tree for row in rows)

    nodes = sorted({row[:end] for row in rows for end in range(1, len(row) + 1)})
    trees = (
        tree
        for tree in itertools.combinations(nodes, min(num_nodes, len(nodes)))
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    )
    assert accepted(tuple(chosen)) == max(accepted(tree) for tree in trees)


def test_tree_sizes_are_bounded() -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_NODES} nodes"):
        HeadStatistics.from_ranks(RANKS).choices(0)
