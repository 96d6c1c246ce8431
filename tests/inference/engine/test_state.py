"""What decoding keeps between two steps: no more than what was committed.

Shapes: B rows, T tokens, N tree nodes, D hidden.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, StoppingCriteriaList

from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.cache import RowCache
from tests.allocations import Allocations

BATCH, NODES, HIDDEN = 3, 64, 32


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
