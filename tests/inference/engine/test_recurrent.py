"""Targets with a recurrent state, with the truth planted on chains: what generate() writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import TargetModel
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.engine.capability import capability
from medusa_heads.target.recurrent import RecurrentCache, StateLayer
from scripts.prove.tiny_models import builder
from tests.inference.planted import PlantedDrafter
from tests.inference.recurrent import KINDS, planted, prompt, tiny_target, written

pytestmark = pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [21, 150])  # longer than windows and chunks
def test_planted_chains_are_token_equal(kind: str, length: int) -> None:
    target, inputs = tiny_target(kind), prompt(length)
    assert capability(target) == "recurrent"
    expected = written(target.model, inputs)
    for share in (0.5, 0.9):
        got, stats = planted(target, inputs, expected, share)
        assert torch.equal(got, expected)
        assert stats.tokens_per_step > 1.4


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_tokens_are_those_of_the_same_seed(kind: str) -> None:
    target, inputs = tiny_target(kind), prompt()
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 1.3}
    expected = written(target.model, inputs, **drawn)
    got, stats = planted(target, inputs, expected, **drawn)
    assert torch.equal(got, expected) and stats.tokens_per_step > 1.5


def test_what_is_not_absorbed_is_soon_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a drafter allows, from nothing read again to all of the text."""
    target, inputs = tiny_target("qwen3_next"), prompt()
    expected, rates = written(target.model, inputs), []
    for most in (0, 1, 5, 99):
        monkeypatch.setattr(PlantedDrafter, "most_again", lambda *_, most=most: most)
        got, stats = planted(target, inputs, expected, 0.5)
        assert torch.equal(got, expected)
        rates.append(stats.tokens_per_step)
    assert rates[0] < rates[3]


def test_tokens_per_forward_are_near_those_of_attention_alone() -> None:
    rates = {}
    for kind in ("llama", "qwen3_next"):
        target, steps, tokens = tiny_target(kind), 0, 0
        for seed in range(2):
            inputs = prompt(seed=seed)
            expected = written(target.model, inputs, max_new_tokens=100)
            _, stats = planted(target, inputs, expected, 0.6, max_new_tokens=100)
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
    target, inputs = tiny_target("qwen3_next"), prompt()
    expected = written(target.model, inputs)
    capability(target)
    fault(monkeypatch)
    got, _ = planted(target, inputs, expected)
    assert not torch.equal(got, expected)


@pytest.mark.parametrize("fault", FAULTS[:3])
def test_a_state_that_is_not_put_back_is_noticed_by_the_gate(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    target = TargetModel(builder("qwen3_next")((0.15, 0.15)))
    with pytest.raises(UnsupportedArchitecture, match="keeps a recurrent state, on which"):
        capability(target)


@pytest.mark.parametrize("kind", ["nemotron_h", "zamba2"])
def test_time_steps_of_several_tokens_are_those_of_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers limits the time steps of several tokens alone, and wide weights show it."""
    build = builder(kind)
    assert capability(TargetModel(build((1.0, 0.3)))) == "recurrent"
    limited = "medusa_heads.inference.engine.recurrent.time_steps_of_one_token"
    monkeypatch.setattr(limited, lambda model: torch.no_grad())
    with pytest.raises(UnsupportedArchitecture, match="keeps a recurrent state, on which"):
        capability(TargetModel(build((1.0, 0.3))))


def test_a_state_that_is_kept_elsewhere_is_refused_by_name() -> None:
    # Which of the two is missed depends on what transformers' own cache says of the layers.
    why = "recurrent_gemma does not keep its (text|state) in"
    with pytest.raises(UnsupportedArchitecture, match=why):
        capability(tiny_target("recurrent_gemma"))
