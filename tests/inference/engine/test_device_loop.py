"""Steps that are one graph: generate()'s tokens, no question to the host, no second graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import HeadsConfig, MedusaModel, new_heads
from medusa_heads.errors import MedusaWarning
from medusa_heads.inference.acceptance.at_once import DeepestPath, deepest_path
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine import device_loop, device_state
from medusa_heads.inference.engine.device_state import DeviceState
from medusa_heads.inference.engine.state import DecodingState, padded_mask
from medusa_heads.target.attention import TreeMask
from medusa_heads.trees.tree import TokenTree, TreeShape
from scripts.measure.host_waits import counted
from tests.conftest import DEVICE, TinyLlama
from tests.inference.padded import padded
from tests.inference.planted import BUSHY
from tests.inference.reference import reference

NEW = 24
BATCHES = ([0], [0, 3, 7], [2, 0, 0, 5, 1, 8, 0, 3])  # padding of each row
SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 0.95}


class PlantedOnDevice(Drafter):
    """Trees with the true continuation on one path, as deep as the place in the text says: the
    `truth` of 0, 1, .. levels in turn. All that branches off is false, and what is behind it true.
    """

    def __init__(self, texts: Sequence[Sequence[int]], truth: Sequence[int]) -> None:
        self.shape = TreeShape.from_choices(BUSHY)
        self.num_nodes, self.levels = self.shape.num_nodes, self.shape.max_depth
        self.texts_BT = torch.tensor(texts, device=DEVICE)
        self.truth = torch.tensor(truth, device=DEVICE)
        self.depth_N = torch.tensor(self.shape.depth, device=DEVICE)
        path = max(BUSHY, key=len)
        on_path = [choice == path[: len(choice)] for choice in self.shape.choices]
        self.on_path_N = torch.tensor([True, *on_path], device=DEVICE)

    def propose(self, state: DecodingState) -> TokenTree:
        if isinstance(state, DeviceState):
            written_B1 = state.written_B[:, None]
        else:
            written_B1 = torch.tensor([[len(row.tokens)] for row in state.rows], device=DEVICE)
        place_BN = (written_B1 + self.depth_N - 1).clamp(0, self.texts_BT.shape[1] - 1)
        true_BN = self.texts_BT.gather(1, place_BN)
        goal_B1 = self.truth[written_B1 % len(self.truth)]
        false_BN = (self.depth_N <= goal_B1) & ~self.on_path_N | (self.depth_N == goal_B1 + 1)
        tokens_BN = (true_BN + false_BN) % 199
        return self.shape.tree(tokens_BN.where(self.depth_N > 0, state.roots_B[:, None]))


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama().to(DEVICE)
    made.generation_config.pad_token_id = 0
    return made


@pytest.fixture(scope="module")
def medusa(model: Any) -> MedusaModel:
    return with_heads(model)


def with_heads(model: Any, backend: Any = "eager", **config: Any) -> MedusaModel:
    heads = new_heads(model, HeadsConfig(num_heads=3, **config))
    return MedusaModel(model, heads, tree="7", compile="steps", compile_backend=backend)


def text(medusa: MedusaModel, inputs: Any, seed: int = 3, **options: Any) -> Tensor:
    """All of it, from steps on the device that are not compiled."""
    torch.manual_seed(seed)
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    with medusa.target.uncompiled():  # type: ignore[attr-defined]
        made = medusa.generate(**inputs, **options)
    assert isinstance(made, Tensor)
    return made


def planted(model: Any, inputs: Any, truth: Sequence[int]) -> PlantedOnDevice:
    length = inputs["input_ids"].shape[1]
    options = {"do_sample": False, "max_new_tokens": NEW + 9, **inputs}
    return PlantedOnDevice(reference(model, **options)[:, length:].tolist(), truth)


@pytest.mark.parametrize("padding", BATCHES, ids=["1 row", "3 rows", "8 rows"])
@pytest.mark.parametrize("truth", [[4], [0], [2, 0, 4, 1, 3]], ids=["right", "wrong", "both"])
def test_planted_drafts(
    model: Any, medusa: MedusaModel, padding: list[int], truth: list[int]
) -> None:
    inputs = padded(padding, 12)
    medusa.drafter = planted(model, inputs, truth)
    for new in (NEW, NEW - 1, 2):  # the last token within a path
        expected = reference(model, do_sample=False, max_new_tokens=new, **inputs)
        assert torch.equal(text(medusa, inputs, max_new_tokens=new), expected)
        stats = medusa.last_stats
        assert stats.seconds["step"] and stats.tokens == new * len(padding)
        assert sum(n * (1 + k) for k, n in stats.accepted.items()) == stats.tokens
    whole = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)[:, 12:]
    for place in (5, 18):
        ends = {"eos_token_id": [int(whole[0, place]), int(whole[-1, 11])]}
        expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs, **ends)
        assert torch.equal(text(medusa, inputs, **ends), expected)
    if truth == [0]:
        assert set(medusa.last_stats.accepted) == {0}
    elif truth == [4]:
        text(medusa, inputs)
        assert medusa.last_stats.tokens_per_step > 3


def test_negative_controls(
    model: Any, medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = padded([0, 3, 7], 12)
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
    medusa.drafter = planted(model, inputs, [2, 0, 4, 1, 3])
    assert torch.equal(text(medusa, inputs), expected)

    def causal(tree: TokenTree, *given: Any) -> TreeMask:
        all_NN = torch.ones_like(tree.ancestors_BNN).tril()
        return padded_mask(replace(tree, ancestors_BNN=all_NN), *given)

    with monkeypatch.context() as wrong:
        wrong.setattr(device_state, "padded_mask", causal)
        assert not torch.equal(text(medusa, inputs), expected)

    def without_ancestors(tree: TokenTree, drawn_BN: Tensor, levels: int) -> DeepestPath:
        own_NN = torch.eye(tree.num_nodes, dtype=torch.bool)
        lonely = replace(tree, ancestors_BNN=own_NN.expand_as(tree.ancestors_BNN))
        return deepest_path(lonely, drawn_BN, levels)

    monkeypatch.setattr(device_loop, "deepest_path", without_ancestors)
    assert not torch.equal(text(medusa, inputs), expected)


KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "hydra": {"kind": "hydra"},
    "correction": {"correction_rank": 8},
    "features": {"features": (0,)},
    "own matrices": {"vocab_matrix": "own"},
    "prefix": {"prefix_attention": True, "correction_rank": 8},
    "block": {"kind": "block"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_all_kinds(model: Any, kind: str) -> None:
    """Greedy text is that of generate(), and drawn text that of steps which ask the host."""
    medusa, inputs = with_heads(model, **KINDS[kind]), padded([0, 4, 0], 12)
    asking = MedusaModel(model, medusa.heads, tree="none")
    drawn = {"max_new_tokens": NEW, **SAMPLING}
    torch.manual_seed(3)
    expected_drawn = asking.generate(**inputs, **drawn)  # type: ignore[arg-type]
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
    for tree in ("chain", "7", "dynamic:7", "none"):
        medusa.use_tree(tree)
        assert torch.equal(text(medusa, inputs, max_new_tokens=NEW), expected), tree
        assert "step" in medusa.last_stats.seconds
        assert torch.equal(text(medusa, inputs, **drawn), expected_drawn), tree
        assert "step" in medusa.last_stats.seconds
    assert not torch.equal(text(medusa, inputs, seed=4, **drawn), expected_drawn)


@pytest.mark.parametrize("options", [{}, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", ["7", "dynamic:7"])
def test_the_host_waits_for_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch, tree: str, options: dict[str, Any]
) -> None:
    """But for the one flag, a step late; and it builds no tensor."""
    monkeypatch.setattr(device_loop, "_READ_LATE", {"cpu", "cuda"})
    medusa, inputs = with_heads(model), padded([0, 3, 7], 12)
    medusa.use_tree(tree)
    counts: list[Counter[Any]] = []
    forwards = []
    expected = text(medusa, inputs, **options)
    for new in (3, NEW):
        with counted() as asked:
            made = text(medusa, inputs, max_new_tokens=new, **options)
        counts.append(asked)
        forwards.append(medusa.last_stats.forwards)
    assert torch.equal(made, expected)
    assert counts[1] - counts[0] == {"read": forwards[1] - forwards[0]}
    medusa.target.whole_steps = False  # type: ignore[attr-defined]
    with counted() as asked:
        text(medusa, inputs, **options)
    assert asked.total() > 8 * forwards[1]


def test_what_needs_the_host_takes_the_other_road(
    model: Any, medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, taken = padded([0], 12), []
    decode = device_loop.DeviceLoop.decode
    monkeypatch.setattr(
        device_loop.DeviceLoop, "decode", lambda *args: (taken.append(1), decode(*args))
    )
    medusa.use_tree("7")
    text(medusa, inputs, max_new_tokens=4)
    assert taken == [1]
    for options in (
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 2, "eos_token_id": 3},
        {"return_dict_in_generate": True, "output_scores": True},
        {"stopping_criteria": [lambda ids, scores: torch.tensor([False])]},
        {"eos_token_id": list(range(9))},
    ):
        with medusa.target.uncompiled():  # type: ignore[attr-defined]
            medusa.generate(**inputs, max_new_tokens=4, do_sample=False, **options)  # type: ignore[arg-type]
    medusa.use_tree("auto")
    text(medusa, inputs, max_new_tokens=4)
    medusa.target.whole_steps = False  # type: ignore[attr-defined]
    medusa.use_tree("7")
    text(medusa, inputs, max_new_tokens=4)
    medusa.target.whole_steps = True  # type: ignore[attr-defined]
    assert taken == [1]


def test_one_graph_for_all_texts_of_a_shape(tiny_llama: TinyLlama) -> None:
    """However long they are, and wherever their rows end; of a whole step, without a break."""
    torch._dynamo.reset()
    model, graphs = tiny_llama(num_layers=1), []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model.generation_config.pad_token_id = 0
    medusa = with_heads(model, count)
    for padding, new, ends in (([0, 3], 30, None), ([1, 0], 170, None), ([5, 5], 60, [3, 5])):
        inputs = padded(padding, 12)
        options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": ends}
        made = medusa.generate(**inputs, **options)  # type: ignore[arg-type]
        assert torch.equal(made, model.generate(**inputs, **options))
        assert "step" in medusa.last_stats.seconds
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_other_road(model: Any, kind: str) -> None:
    """Step by step, of heads in which all weights count, also those of a prefix layer."""
    heads = new_heads(model, HeadsConfig(num_heads=3, **KINDS[kind]))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    medusa = MedusaModel(model, heads, tree="7", compile="steps", compile_backend="eager")
    drafted: list[list[Tensor]] = []
    propose = medusa.drafter.propose

    def recorded(state: DecodingState) -> TokenTree:
        tree = propose(state)
        drafted[-1].append(tree.tokens_BN.clone())
        return tree

    medusa.drafter.propose = recorded  # type: ignore[method-assign]
    for whole_steps in (True, False):
        medusa.target.whole_steps = whole_steps  # type: ignore[attr-defined]
        for options in ({}, SAMPLING):
            drafted.append([])
            text(medusa, padded([0], 12), **options)
            assert ("step" in medusa.last_stats.seconds) == whole_steps
    for on_device, asked in zip(drafted[:2], drafted[2:], strict=True):
        first, *steps = on_device  # once to make what is kept
        assert torch.equal(first, steps[0])
        assert torch.equal(torch.cat(steps), torch.cat(asked))


def test_trained_heads_are_as_often_right() -> None:
    """In long paths too, whose positions a prefix layer reads at once."""
    options: dict[str, Any] = {"tree": "dynamic:9", "dtype": torch.float32, "device": DEVICE}
    model = MedusaModel.from_pretrained(
        "assets/demo-heads", compile="steps", compile_backend="eager", **options
    )
    inputs, accepted = padded([0, 2, 5], 12, range(5, 4000)), []
    for whole_steps in (True, False):
        model.target.whole_steps = whole_steps  # type: ignore[attr-defined]
        made = text(model, inputs, eos_token_id=None, pad_token_id=0)
        accepted.append((model.last_stats.accepted, model.last_stats.steps, made.tolist()))
    assert accepted[0] == accepted[1]
    assert max(accepted[0][0]) >= 3


class Asking(PlantedOnDevice):
    """Breaks the graph."""

    def propose(self, state: DecodingState) -> TokenTree:
        if int(state.roots_B[0]) < 0:
            raise AssertionError
        return super().propose(state)


def test_a_step_that_is_no_graph_is_taken_in_parts(model: Any) -> None:
    medusa, inputs = with_heads(model), padded([0, 3], 12)
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
    medusa.drafter = planted(model, inputs, [2, 0, 4])
    medusa.drafter.__class__ = Asking
    with pytest.warns(MedusaWarning, match="the whole is no graph"):
        made = medusa.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    assert torch.equal(made, expected)  # type: ignore[arg-type]
    assert max(medusa.last_stats.accepted) > 1
