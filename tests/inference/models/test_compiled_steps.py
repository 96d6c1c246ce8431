"""Steps that are one graph: no question to the host, and no second graph."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from medusa_heads import MedusaModel
from medusa_heads.errors import MedusaWarning
from medusa_heads.inference.engine import device_loop, reading
from medusa_heads.inference.engine.device_state import DeviceState
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.trees.tree import TokenTree
from scripts.measure.host_waits import counted, graphs_of
from tests.conftest import DEVICE, TinyLlama
from tests.inference.on_device import (
    HERE,
    NEW,
    SAMPLING,
    PlantedOnDevice,
    drawn_planted,
    planted,
    text,
    with_heads,
)
from tests.inference.padded import padded
from tests.inference.reference import reference
from tests.pairs import with_slow

pytestmark = pytest.mark.usefixtures("small_caches")


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama().to(DEVICE)
    made.generation_config.pad_token_id = 0
    return made


@pytest.fixture(scope="module")
def medusa(model: Any) -> MedusaModel:
    return with_heads(model)


@pytest.mark.parametrize(
    ("tree", "options"),
    with_slow([("auto", SAMPLING)], [("7", SAMPLING), ("dynamic:7", {})]),
    ids=["auto-sampled", "7-sampled", "dynamic:7-greedy"],
)
def test_the_host_waits_for_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch, tree: str, options: dict[str, Any]
) -> None:
    """But for the one flag, a step late; and it builds no tensor."""
    monkeypatch.setattr(reading, "_READ_LATE", {"cpu", "cuda"})
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
    kinds = ["read"] if HERE == "cpu" else ["read", "copied"]  # the figures, while steps go on
    assert counts[1] - counts[0] == dict.fromkeys(kinds, forwards[1] - forwards[0])
    medusa.target.whole_steps = False  # type: ignore[attr-defined]
    with counted() as asked:
        text(medusa, inputs, **options)
    assert asked.total() > 8 * forwards[1]


def test_what_needs_the_host_takes_the_other_road(
    model: Any, medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, taken = padded([0], 12), []
    decode = device_loop.DeviceLoop.decode

    def counted_decode(*args: Any) -> None:
        taken.append(1)
        decode(*args)

    monkeypatch.setattr(device_loop.DeviceLoop, "decode", counted_decode)
    medusa.use_tree("7")
    text(medusa, inputs, max_new_tokens=4)
    assert taken == [1]
    for options in (
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 2, "eos_token_id": 3},
        {"return_dict_in_generate": True, "output_scores": True},
        {"stopping_criteria": [lambda ids, scores: torch.tensor([False], device=DEVICE)]},
        {"eos_token_id": list(range(9))},
    ):
        with medusa.target.uncompiled():  # type: ignore[attr-defined]
            medusa.generate(**inputs, max_new_tokens=4, do_sample=False, **options)  # type: ignore[arg-type]
    medusa.target.whole_steps = False  # type: ignore[attr-defined]
    for tree in ("auto", "7"):
        medusa.use_tree(tree)
        text(medusa, inputs, max_new_tokens=4)
    medusa.target.whole_steps = True  # type: ignore[attr-defined]
    assert taken == [1]
    medusa.use_tree("auto")
    text(medusa, inputs, max_new_tokens=4)
    assert taken == [1, 1]


def test_one_graph_for_all_texts_of_a_shape(tiny_llama: TinyLlama) -> None:
    """However long they are, wherever their rows end, and whatever they are drawn at; of a whole
    step, without a break."""
    torch._dynamo.reset()
    model, graphs = tiny_llama(num_layers=1).to(DEVICE), list[Any]()

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model.generation_config.pad_token_id = 0
    medusa = with_heads(model, count)
    asking = MedusaModel(model, medusa.heads, tree="none")
    texts: list[tuple[list[int], dict[str, Any]]] = [
        ([0, 3], {"max_new_tokens": 12}),
        ([1, 0], {"max_new_tokens": 36}),
        ([5, 5], {"max_new_tokens": 20, "eos_token_id": [3, 5]}),
    ]
    at = ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.1, "top_p": 0.5})
    for drawn in (False, True):
        for number, (padding, options) in enumerate(texts[drawn:]):
            inputs: Any = padded(padding, 12)
            options = {"eos_token_id": None, "do_sample": drawn, **options}
            options |= {"top_k": 30, **at[number % 2]} if drawn else {}
            made: list[Any] = []
            for each in (medusa, asking):
                torch.manual_seed(number)
                made.append(each.generate(**inputs, **options))
            assert torch.equal(*made)
            assert drawn or torch.equal(made[0], model.generate(**inputs, **options))
            assert "step" in medusa.last_stats.seconds
        assert len(graphs) == 1 + drawn


READING = [("eagle3", "dynamic:7"), ("hydra", "dynamic:7"), ("block", "dynamic:7")]


@pytest.mark.parametrize(
    ("kind", "tree"), with_slow([("eagle3", "7+suffix")], [*READING, ("block", "7+suffix")])
)
def test_heads_that_read_their_drafts_or_the_text_are_a_part_of_the_graph(
    tiny_llama: TinyLlama, kind: str, tree: str
) -> None:
    medusa = with_heads(tiny_llama(num_layers=1).to(DEVICE), kind=kind)
    medusa.use_tree(tree)
    assert graphs_of(medusa, 2, 20, **SAMPLING) == (True, 1, 0)


@pytest.mark.slow
def test_recycled_trees_are_a_part_of_the_graph(tiny_llama: TinyLlama) -> None:
    options: dict[str, Any] = {"compile": "steps", "compile_backend": "eager"}
    model = tiny_llama(num_layers=1).to(DEVICE)
    recycling = TrainingFreeModel(model, "recycling:7", **options)
    assert graphs_of(recycling, 2, 20, **SAMPLING) == (True, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SAMPLING], ids=["greedy", "drawn"])
def test_one_graph_for_two_thousand_tokens(tiny_llama: TinyLlama, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_llama(num_layers=1, max_position_embeddings=4096).to(DEVICE)
    inputs: Any = padded([0, 3, 7], 12)
    model.generation_config.pad_token_id = 0
    medusa = with_heads(model, "inductor")
    asking = MedusaModel(model, medusa.heads, tree="none")
    options = {"do_sample": False, **options, "max_new_tokens": 2000}
    torch.manual_seed(3)
    expected: Any = asking.generate(**inputs, **options)
    medusa.drafter = PlantedOnDevice(expected[:, 12:].tolist(), [2, 0, 4, 1, 3])
    torch.manual_seed(3)
    made: Any = medusa.generate(**inputs, **options)
    assert torch.equal(made, expected)
    assert expected.shape == (3, 2012)
    assert "step" in medusa.last_stats.seconds
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"] and not counters["unimplemented"]


@pytest.mark.slow
def test_inductor_draws_the_same(tiny_llama: TinyLlama) -> None:
    """Whatever was drafted; and only with the noise that the host has."""
    model = tiny_llama(num_layers=1).to(DEVICE)
    model.generation_config.pad_token_id = 0
    medusa, begin = with_heads(model, "inductor"), DeviceState.begin

    def made(inputs: Any) -> Any:
        torch.manual_seed(3)
        return medusa.generate(**inputs, max_new_tokens=NEW, **SAMPLING)

    def another(state: DeviceState, *given: Any) -> None:
        begin(state, *given)
        state.keys_B += 1

    for padding in ([0], [0, 3, 7]):
        inputs = padded(padding, 12)
        expected = drawn_planted(medusa, inputs, [2, 0, 4, 1, 3])
        assert torch.equal(made(inputs), expected)
        assert max(medusa.last_stats.accepted) == 4 and "step" in medusa.last_stats.seconds
        with pytest.MonkeyPatch.context() as wrong:
            wrong.setattr(DeviceState, "begin", another)
            assert not torch.equal(made(inputs), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::medusa_heads.errors.MedusaWarning")
def test_windows_are_a_part_of_the_graph() -> None:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(vocab_size=199, num_hidden_layers=1, sliding_window=8, **sizes)
    model: Any = AutoModelForCausalLM.from_config(config).float().eval().to(DEVICE)
    model.generation_config.pad_token_id = 0
    medusa, options = with_heads(model), dict[str, Any](padded([0, 3], 12))
    options |= {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    made: Any = medusa.generate(**options)
    assert torch.equal(made, model.generate(**options))
    assert "step" in medusa.last_stats.seconds


def caches_left(medusa: MedusaModel) -> list[Any]:
    """Of those that the target keeps, once it keeps them no longer."""
    target: Any = medusa.target
    caches = [weakref.ref(cache) for cache in target._caches.values()]
    target._caches.clear()
    gc.collect()
    return [cache() for cache in caches]


def test_nothing_outlives_its_target(tiny_llama: TinyLlama) -> None:
    """And no cache its text, but for those that the target keeps."""
    model = tiny_llama(num_layers=1).to(DEVICE)
    model.generation_config.pad_token_id = 0
    medusa = with_heads(model, prefix_attention=True)
    text(medusa, padded([0], 12))
    assert caches_left(medusa) == [None]
    text(medusa, padded([0], 12))
    kept = weakref.ref(medusa.target)
    del medusa
    gc.collect()
    assert kept() is None


class Failing(PlantedOnDevice):
    def propose(self, state: DecodingState) -> TokenTree:
        raise MemoryError


def test_no_cache_outlives_a_text_that_fails(model: Any) -> None:
    medusa = with_heads(model)
    medusa.drafter = Failing([[0]], [0])
    with pytest.raises(MemoryError):
        text(medusa, padded([0], 12))
    assert caches_left(medusa) == [None]


class Asking(PlantedOnDevice):
    """Breaks the graph."""

    def propose(self, state: DecodingState) -> TokenTree:
        if int(state.roots_B[0]) < 0:
            raise AssertionError
        return super().propose(state)


def test_a_step_that_is_no_graph_is_taken_in_parts(tiny_llama: TinyLlama) -> None:
    model = tiny_llama(num_layers=1).to(DEVICE)
    model.generation_config.pad_token_id = 0
    medusa = with_heads(model)
    inputs: Any = padded([0, 3], 12)
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
    medusa.drafter = planted(model, inputs, [2, 0, 4])
    medusa.drafter.__class__ = Asking
    with pytest.warns(MedusaWarning, match="the whole is no graph"):
        options: Any = {"do_sample": False, "max_new_tokens": NEW}
        made: Any = medusa.generate(**inputs, **options)
    assert torch.equal(made, expected)
    assert max(medusa.last_stats.accepted) > 1
    assert "target" in medusa.last_stats.seconds and "step" not in medusa.last_stats.seconds
    medusa.use_tree("7")  # that one fails says nothing of others
    made = medusa.generate(**inputs, **options)
    assert torch.equal(made, expected)
    assert "step" in medusa.last_stats.seconds
