"""Targets with a recurrent state: chains from every drafter, token for token as generate() writes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.engine import recurrent
from medusa_heads.inference.engine.capability import capability
from medusa_heads.inference.engine.decoding import decode
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.inference.models.drafted import DraftedModel
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.recurrent import RecurrentCache, StateLayer
from scripts.prove.tiny_models import builder
from tests.inference.planted import PlantedDrafter
from tests.inference.processor_kinds import Matcher

KINDS = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_next",
)
CHAIN = [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
NEW = 48

pytestmark = pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")


@cache
def target(kind: str) -> TargetModel:
    view = TargetModel(builder(kind)((0.15, 0.15)))
    view.freeze()
    view.model.generation_config.eos_token_id = None
    view.model.generation_config.pad_token_id = 0
    return view


def prompt(length: int = 21, seed: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids_1T = torch.randint(1, 190, (1, length), generator=random)
    return {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}


def plain(view: TargetModel, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """What generate() writes; the same seed before every text."""
    torch.manual_seed(7)
    model: Any = view.model
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False} | options)


def planted(
    view: TargetModel,
    inputs: dict[str, Tensor],
    expected_1T: Tensor,
    share: float = 0.75,
    **more: Any,
) -> tuple[Any, GenerationStats]:
    """The same with the true continuation planted on chains, which are wrong here and there."""
    truth = expected_1T[:, inputs["input_ids"].shape[1] :].tolist()
    drafter, stats = PlantedDrafter(truth, view.vocab_size, CHAIN, share), GenerationStats()

    def custom(model: Any, input_ids: Tensor, synced_gpus: bool = False, **kwargs: Any) -> Any:
        return decode(view, drafter, input_ids, stats=stats, **kwargs)

    return plain(view, inputs, custom_generate=custom, **more), stats


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [21, 150])  # longer than windows and chunks
def test_planted_chains_are_token_equal(kind: str, length: int) -> None:
    view, inputs = target(kind), prompt(length)
    assert capability(view) == "recurrent"
    for share in (0.5, 0.9):
        expected = plain(view, inputs)
        got, stats = planted(view, inputs, expected, share)
        assert torch.equal(got, expected)
        assert stats.tokens_per_step > 1.4


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_tokens_are_those_of_the_same_seed(kind: str) -> None:
    view, inputs, drawn = target(kind), prompt(), {"do_sample": True, "temperature": 1.3}
    expected = plain(view, inputs, **drawn)
    got, stats = planted(view, inputs, expected, **drawn)
    assert torch.equal(got, expected) and stats.tokens_per_step > 1.5


def test_tokens_per_forward_are_near_those_of_attention_alone() -> None:
    rates = {}
    for kind in ("llama", "qwen3_next"):
        view, steps, tokens = target(kind), 0, 0
        for seed in range(3):
            inputs = prompt(seed=seed)
            expected = plain(view, inputs, max_new_tokens=100)
            _, stats = planted(view, inputs, expected, 0.6, max_new_tokens=100)
            steps, tokens = steps + stats.steps, tokens + stats.tokens
        rates[kind] = tokens / steps
    assert rates["qwen3_next"] > 0.85 * rates["llama"]


def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentCache, "put_back", lambda cache: None)


def without_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    def states(layer: StateLayer) -> list[Tensor]:
        return [state for state in layer.recurrent_states.values() if state is not None]

    monkeypatch.setattr(StateLayer, "states", states)


def without_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    def states(layer: StateLayer) -> list[Tensor]:
        return [state for state in layer.conv_states.values() if state is not None]

    monkeypatch.setattr(StateLayer, "states", states)


def held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentCache, "move_on", lambda cache: None)


FAULTS = (stale, without_convolution, without_recurrence, held_once)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_state_that_is_not_put_back_is_noticed_in_the_text(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls of the tests above."""
    view, inputs = target("qwen3_next"), prompt()
    expected = plain(view, inputs)
    capability(view)
    fault(monkeypatch)
    got, _ = planted(view, inputs, expected)
    assert not torch.equal(got, expected)


@pytest.mark.parametrize("fault", FAULTS[:3])
def test_a_state_that_is_not_put_back_is_noticed_by_the_gate(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    view = TargetModel(builder("qwen3_next")((0.15, 0.15)))
    with pytest.raises(UnsupportedArchitecture, match="keeps a recurrent state, on which"):
        capability(view)


def test_what_follows_from_several_tokens_otherwise_is_refused_by_name() -> None:
    """Jamba's scan of several tokens begins at an empty state."""
    with pytest.raises(UnsupportedArchitecture, match="jamba keeps a recurrent state, on which"):
        capability(target("jamba"))


def test_a_cache_that_is_not_the_one_given_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitecture, match="mamba2 does not keep its text in the cache"):
        capability(target("mamba2"))
