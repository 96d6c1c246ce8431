"""A draft model's chains in steps that are one graph: drafts and text of the other road."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig

from medusa_heads.inference.drafters.model.text_on_device import DraftedTextOnDevice
from medusa_heads.inference.engine import reading
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.models.drafted import DraftedModel
from medusa_heads.target.cache import RowCache
from medusa_heads.target.graphs.static_cache import StaticRowCache
from medusa_heads.trees.tree import TokenTree
from scripts.measure.host_waits import counted, graphs_of
from tests.conftest import DEVICE, TinyLlama
from tests.inference.on_device import HERE, LATE, NEW, SAMPLING, text
from tests.inference.padded import padded
from tests.inference.reference import reference

PADDING = ([0], [0, 3, 7])


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama().to(DEVICE)
    made.generation_config.pad_token_id = 0
    return made


def nearly(model: Any, noise: float = 0.02) -> Any:
    """A draft model that is often right."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.add_(drawn.to(parameter.device), alpha=noise * float(parameter.std()))
    return draft


def drafted_by(model: Any, draft: Any, tree: str, backend: Any = "eager") -> DraftedModel:
    return DraftedModel(model, draft, tree=tree, compile="steps", compile_backend=backend)


@pytest.mark.parametrize(
    ("tree", "padding"),
    [
        pytest.param("chain:1", PADDING[1], marks=pytest.mark.slow),
        ("chain:4", PADDING[1]),
        pytest.param("chain:4", PADDING[0], marks=pytest.mark.slow),
        ("sampled:3", PADDING[0]),
        pytest.param("chain:1", PADDING[0], marks=pytest.mark.slow),
        pytest.param("sampled:3", PADDING[1], marks=pytest.mark.slow),
    ],
)
def test_text_and_drafts_are_those_of_the_other_road(
    model: Any, tree: str, padding: list[int]
) -> None:
    inputs = padded(padding, 12)
    greedy = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
    drafted = drafted_by(model, nearly(model), tree)
    accepted: list[Any] = []
    drafts: list[list[Tensor]] = []
    propose = drafted.drafter.propose

    def recorded(state: DecodingState) -> TokenTree:
        proposed = propose(state)
        drafts[-1].append(proposed.tokens_BN.clone())
        return proposed

    drafted.drafter.propose = recorded  # type: ignore[method-assign]
    for whole_steps in (True, False):
        drafted.target.whole_steps = whole_steps  # type: ignore[attr-defined]
        for options in ({}, SAMPLING, {}):  # a text after another one, in the same cache
            drafts.append([])
            made = text(drafted, inputs, **options)
            assert ("step" in drafted.last_stats.seconds) == whole_steps
            accepted.append((drafted.last_stats.accepted, made.tolist()))
            assert options or torch.equal(made, greedy)
    assert accepted[:3] == accepted[3:]
    assert len(accepted[0][0]) > 1 and max(accepted[0][0]) == drafted.drafter.levels
    if len(padding) == 1:
        for on_device, asked in zip(drafts[:3], drafts[3:], strict=True):
            assert len(on_device) == len(asked) + LATE
            assert torch.equal(torch.cat(on_device[: len(asked)]), torch.cat(asked))


def test_a_draft_model_with_a_window(model: Any) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=199,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        eos_token_id=None,
    )
    draft: Any = AutoModelForCausalLM.from_config(config).float().eval().to(DEVICE)
    drafted, inputs = drafted_by(draft, copy.deepcopy(draft), "chain:4"), padded([0, 3, 7], 12)
    draft.generation_config.pad_token_id = 0
    expected = reference(draft, do_sample=False, max_new_tokens=NEW, **inputs)
    assert torch.equal(text(drafted, inputs), expected)
    # The same model is always right, but for the last step.
    assert drafted.last_stats.accepted[4] >= 3 * (NEW // 5 - 1)


def test_a_layer_that_kept_nothing_is_left_alone(model: Any) -> None:
    """Such as what would attend to a picture."""
    kept: Any = RowCache(model.config)
    copy_of: Any = StaticRowCache(model.config, 16)
    rows = torch.randn(1, 2, 5, 8)
    kept.layers[1].update(rows, -rows)
    copy_of.copy_rows(kept, 5)
    assert not copy_of.layers[0].is_initialized
    keys_BHCX, values_BHCX = copy_of.layers[1].buffers()
    assert torch.equal(keys_BHCX[:, :, :5], rows) and torch.equal(values_BHCX[:, :, :5], -rows)
    assert not keys_BHCX[:, :, 5:].any()


def test_where_the_drafts_lie_counts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not moved into the text is missed."""
    inputs, steps = padded([0, 3], 12), []
    for moves in (True, False):  # each with a cache of its own
        drafted = drafted_by(model, copy.deepcopy(model), "chain:4")
        if not moves:
            monkeypatch.setattr(DraftedTextOnDevice, "_move_in", lambda _: None)
        text(drafted, inputs, max_new_tokens=24)  # whole chains but the last
        steps.append(drafted.last_stats.tokens_per_step)
    assert steps[0] == 4 and steps[1] < 3.5


def test_the_host_waits_for_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_READ_LATE", {"cpu", "cuda"})
    drafted, inputs = drafted_by(model, nearly(model), "chain:3"), padded([0, 3, 7], 12)
    counts: list[Counter[Any]] = []
    forwards = []
    text(drafted, inputs, **SAMPLING)
    for new in (5, NEW):
        with counted() as asked:
            text(drafted, inputs, max_new_tokens=new, **SAMPLING)
        counts.append(asked)
        forwards.append(drafted.last_stats.forwards)
    kinds = ["read"] if HERE == "cpu" else ["read", "copied"]  # the figures, while steps go on
    assert counts[1] - counts[0] == dict.fromkeys(kinds, forwards[1] - forwards[0])


@pytest.mark.slow
def test_it_is_a_part_of_the_graph(tiny_llama: TinyLlama) -> None:
    model = tiny_llama(num_layers=1).to(DEVICE)
    assert graphs_of(drafted_by(model, nearly(model), "chain:2"), 2, 20, **SAMPLING) == (True, 1, 0)


@pytest.mark.slow
def test_inductor_drafts_the_same(model: Any) -> None:
    drafted, accepted = drafted_by(model, nearly(model), "chain:3", "inductor"), []
    inputs: Any = [padded([0], 12), padded([0], 20)]
    for whole_steps in (True, False):
        drafted.target.whole_steps = whole_steps  # type: ignore[attr-defined]
        for each in inputs:
            drafted.generate(**each, do_sample=False, max_new_tokens=NEW)
            assert ("step" in drafted.last_stats.seconds) == whole_steps
            accepted.append(drafted.last_stats.accepted)
    assert accepted[:2] == accepted[2:] and len(accepted[0]) > 2


@pytest.mark.parametrize("tree", ["dynamic:6", "sampled:2x1"])
def test_trees_take_the_other_road(model: Any, tree: str) -> None:
    drafted, inputs = drafted_by(model, nearly(model), tree), padded([0], 12)
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
    assert torch.equal(text(drafted, inputs), expected)
    assert "step" not in drafted.last_stats.seconds
