"""Which numbers of nodes a drafter is given."""

from __future__ import annotations

from typing import Any

import pytest

from medusa_heads import MedusaModel
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.head_trees import DynamicDrafter, SequentialDrafter
from medusa_heads.inference.drafters.heads import TreeSource
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.inference.plan import adaptive
from medusa_heads.trees.statistics import prior_statistics
from tests.conftest import TinyLlama
from tests.inference.rereading import random_heads


@pytest.mark.parametrize(("node", "sizes"), [(0.0, [0, 7, 15, 63]), (0.03, [0, 7]), (1.0, [0, 1])])
def test_no_whole_step_drafts_more_than_usually_pays(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, node: float, sizes: list[int]
) -> None:
    """The fewer, the more each of them takes; and each number is a graph."""
    clock = Clock({tokens: 1.0 + node * (tokens - 1) for tokens in range(1, 65)})
    monkeypatch.setattr(adaptive, "target_clock", lambda *_: clock)
    steps: dict[str, Any] = {"compile": "steps", "compile_backend": "eager"}
    drafter = TrainingFreeModel(tiny_llama(num_layers=1), **steps).drafter
    assert list(drafter.sizes) == sizes and drafter.num_nodes == sizes[-1] + 1


@pytest.mark.parametrize(
    ("node", "tree", "nodes"),
    [(0.0, DynamicDrafter, 7), (1.0, DynamicDrafter, 3), (0.0, SequentialDrafter, 31)],
)
def test_heads_that_read_drafts_follow_the_likeliest_paths_of_each_step(
    tiny_llama: TinyLlama,
    monkeypatch: pytest.MonkeyPatch,
    node: float,
    tree: type[Drafter],
    nodes: int,
) -> None:
    """As many nodes as were measured to pay, few on a CPU; of heads that were not measured a prior
    is drafted."""
    model: Any = tiny_llama(num_layers=1)
    clock = Clock({tokens: 1.0 + node * (tokens - 1) for tokens in range(1, 65)})
    monkeypatch.setattr(adaptive, "target_clock", lambda *_: clock)
    statistics = prior_statistics(3)
    if tree is DynamicDrafter:
        statistics.dynamic_tokens_per_step = {3: 1.8, 7: 2.6, 15: 2.8, 23: 2.9, 31: 3.0}
    heads = random_heads(model, kind="hydra")
    medusa = MedusaModel(model, heads, tree="auto", statistics=statistics)
    drafter: Any = medusa.drafter
    (source,) = (each for each in drafter._sources if isinstance(each, TreeSource))
    assert type(source.drafter) is tree
    assert source.drafter.num_nodes == nodes + 1
