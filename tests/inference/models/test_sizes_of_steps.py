"""Whole steps that verify another number of nodes each: the same text, and one graph for each
number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.inference.engine import device_loop, reading
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.graphs.static_cache import StaticRowCache
from medusa_heads.trees.dynamic_tree import likeliest
from medusa_heads.trees.tree import TokenTree
from scripts.measure.host_waits import graphs_of
from tests import replayed
from tests.conftest import DEVICE, TinyLlama
from tests.inference.on_device import NEW, SAMPLING, drawn_planted, planted, text, with_heads
from tests.inference.padded import padded
from tests.inference.reference import reference
from tests.pairs import alternately


class InTurns:
    """Of every number of nodes in turn, and what was read of each step."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self.asked = list(sizes), list[int]()
        self.read: list[tuple[int, float]] = []

    def next(self) -> int:
        self.asked.append(self._sizes[len(self.asked) % len(self._sizes)])
        return self.asked[-1]

    def learn(self, size: int, accepted: float, expected: list[float], seconds: float) -> None:
        assert seconds > 0 and 0.0 == expected[0] < expected[-1] and expected == sorted(expected)
        self.read.append((size, accepted))


@pytest.mark.parametrize(("options", "late"), alternately(({}, SAMPLING), (False, True)))
def test_another_number_of_nodes_at_every_step(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], late: bool
) -> None:
    """The text is the same, whatever each step verifies of a tree; not so of a tree that is cut
    without its ancestors."""
    monkeypatch.setattr(reading, "_READ_LATE", {"cpu", "cuda"} if late else {"cuda"})
    monkeypatch.setattr(device_loop, "Buckets", InTurns)
    model: Any = tiny_llama(num_layers=1).to(DEVICE)
    model.generation_config.pad_token_id = 0
    medusa, inputs = with_heads(model), padded([0, 3, 7], 12)
    if options:
        right = drawn_planted(medusa, inputs, [4])
    else:
        right = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
        medusa.drafter = planted(model, inputs, [4])
    drafter = medusa.drafter
    drafter.sizes = (0, 2, drafter.num_nodes - 1)
    assert torch.equal(text(medusa, inputs, **options), right)
    known = device_loop._loops[medusa.target]._buckets[drafter]
    ((buckets,),) = ([*of.values()] for of in known.values())
    assert isinstance(buckets, InTurns)
    assert [size for size, _ in buckets.read] == buckets.asked[: len(buckets.read)]
    most = {size: max(kept for of, kept in buckets.read if of == size) for size in drafter.sizes}
    assert most[0] == 0.0 < most[2] <= 2.0 < most[drafter.sizes[-1]]

    def without_ancestors(tree: TokenTree, nodes: int) -> tuple[TokenTree, Tensor]:
        smaller, expected_BN = likeliest(tree, nodes)
        unseen_BNN = tree.ancestors_BNN[:, -nodes:, -nodes:]
        return replace(smaller, ancestors_BNN=unseen_BNN), expected_BN

    monkeypatch.setattr(device_loop, "likeliest", without_ancestors)
    assert not torch.equal(text(medusa, inputs, **options), right)


def test_a_step_moves_no_more_of_the_cache_than_it_verifies(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unread(InTurns):
        def learn(self, *_: Any) -> None:
            """Nothing: where the text offers nothing, nothing is expected."""

    moved: list[int] = []
    move_rows = StaticRowCache.move_rows

    def noted(cache: StaticRowCache, source_BA: Tensor, destination_BA: Tensor) -> None:
        moved.append(source_BA.shape[1])
        move_rows(cache, source_BA, destination_BA)

    monkeypatch.setattr(StaticRowCache, "move_rows", noted)
    monkeypatch.setattr(device_loop, "Buckets", Unread)
    model = tiny_llama(num_layers=1).to(DEVICE)
    model.generation_config.pad_token_id = 0
    auto = TrainingFreeModel(model, compile="steps", compile_backend="eager")
    auto.drafter.sizes = (0, 2, auto.drafter.num_nodes - 1)
    inputs: Any = padded([3, 0], 12)
    made = text(auto, inputs, max_new_tokens=40)
    assert torch.equal(made, model.generate(**inputs, do_sample=False, max_new_tokens=40))
    assert {1, 3} <= set(moved) and max(moved) <= auto.drafter.num_nodes


@pytest.mark.slow
def test_each_number_of_nodes_is_one_graph(tiny_llama: TinyLlama) -> None:
    """Which later texts find."""
    model = tiny_llama(num_layers=1).to(DEVICE)
    model.generation_config.pad_token_id = 0
    auto = TrainingFreeModel(model, compile="steps", compile_backend="eager")
    auto.drafter.sizes = auto.drafter.sizes[-2:]  # each is traced anew
    sizes = len(auto.drafter.sizes)
    assert sizes > 1 and graphs_of(auto, 2, 60) == (True, sizes, 0)
    inputs: Any = padded([3, 0], 12)
    made: Any = auto.generate(**inputs, do_sample=False, max_new_tokens=60)
    assert torch.equal(made, model.generate(**inputs, do_sample=False, max_new_tokens=60))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == sizes


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SAMPLING], ids=["greedy", "drawn"])
def test_each_number_of_nodes_is_one_graph_for_two_thousand_tokens(
    tiny_llama: TinyLlama, options: dict[str, Any]
) -> None:
    model = tiny_llama(num_layers=1, max_position_embeddings=4096).to(DEVICE)
    model.generation_config.pad_token_id = 0
    auto = TrainingFreeModel(model, compile="steps")
    graphs = graphs_of(auto, 3, 2000, **options)
    assert graphs == (True, len(auto.drafter.sizes), 0) and graphs.graphs > 1
    counters = torch._dynamo.utils.counters["stats"]
    # Of the same capacity, and not, however many nodes pay here.
    for padding, length, new in (([0, 3, 7], 12, 1200), ([5, 0, 2], 24, 2000)):
        given: Any = padded(padding, length) | {"do_sample": False, "eos_token_id": None, **options}
        made: list[Any] = []
        for each in (auto, TrainingFreeModel(model, "suffix")):
            torch.manual_seed(5)
            made.append(each.generate(**given, max_new_tokens=new))
        assert torch.equal(*made)
    assert counters["unique_graphs"] <= 2 * graphs.graphs


TREES = ("7", "auto", "dynamic:9")


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("tree", "options"),
    alternately(TREES, ({}, SAMPLING), slow=TREES[1:]),
)
def test_any_device_may_be_the_default(
    tree: str, options: dict[str, Any], tiny_llama: TinyLlama
) -> None:
    """Also one that no number is read from."""
    model, inputs = tiny_llama().to(DEVICE), padded([0, 3], 12)
    first, again = (replayed.with_heads(model, tree) for _ in range(2))
    options = {"max_new_tokens": 12, **options}
    expected = replayed.text(first, inputs, **options)
    with torch.device("meta"):
        for _ in range(3):
            assert torch.equal(replayed.text(again, inputs, **options), expected)
