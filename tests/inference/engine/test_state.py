"""What decoding keeps between two steps.

Shapes: B rows, T tokens, N tree nodes, D hidden.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MaxLengthCriteria, StoppingCriteriaList

from medusa_heads.inference.engine.beginning import finish_step
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.cache import RowCache
from tests.allocations import Allocations
from tests.inference.standing import ELSEWHERE, HIDDEN, NODES, in_cache

BATCH = 3


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
    assert (row.commit(5), row.done) == (False, False)
    assert (row.commit(6), row.done) == (True, True)
    assert row.tokens == [5, 6] and heard.told == [[5], [6]]
    with pytest.raises(AssertionError):
        row.commit(7)


def test_a_row_is_read_outside_of_the_loop_that_wrote_it() -> None:
    row = Row(0, 1, torch.tensor([1, 2]), StopCheck(StoppingCriteriaList()))
    with torch.inference_mode():
        row.commit(5)
        assert row.ids_1T().tolist() == [[1, 2, 5]]
        row.commit(6)
    assert row.ids_1T().tolist() == [[1, 2, 5, 6]]


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
    finish_step(of, [[0, 1], [], [0]], place_of_nodes(3), stats)
    assert (stats.steps, stats.forwards, dict(stats.accepted)) == (2, 1, {1: 1, 0: 1})
    finish_step(of, [[0, 1], [], [0]], place_of_nodes(3), stats)
    assert (stats.steps, stats.forwards, dict(stats.accepted)) == (4, 2, {1: 2, 0: 2})
    assert [heard.told for heard in streamers] == [
        [[0], [1], "step", "step"],
        [],
        [[0], "step", "step"],
    ]
    assert of.hidden_BD[:, 0].tolist() == [1, 100, 200]
