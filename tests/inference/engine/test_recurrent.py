"""Targets with a recurrent state, with the truth planted on chains: what generate() writes; in
batches, where each row is put back for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import TargetModel
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.engine.capability import capability, check_batch
from medusa_heads.target.recurrent import RecurrentCache, StateLayer
from scripts.prove.tiny_models import builder
from tests.inference.padded import padded
from tests.inference.planted import PlantedDrafter
from tests.inference.recurrent import KINDS, planted, prompt, short_target, tiny_target, written
from tests.pairs import with_slow

pytestmark = pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")

SHORT: dict[str, Any] = {"max_new_tokens": 32}
UNEQUAL = (5, 0, 9, 2)


# Their layers are of kinds that others have too.
ALIKE = ("bamba", "granitemoehybrid", "olmo_hybrid", "qwen3_5_text")
SHORTER = (*ALIKE, "qwen3_next")


@pytest.mark.parametrize(
    ("kind", "length", "share"),
    [
        # Windows, chunks and more.
        *(pytest.param(k, 150, 0.9, marks=[pytest.mark.slow] * (k in SHORTER)) for k in KINDS),
        *with_slow([("qwen3_next", 21, 0.5)], ((k, 21, 0.5) for k in KINDS[:-1])),
    ],
)
def test_planted_chains_are_token_equal(kind: str, length: int, share: float) -> None:
    target, inputs = tiny_target(kind), prompt(length)
    assert capability(target) == "recurrent"
    expected = written(target.model, inputs, max_new_tokens=36)
    got, stats = planted(target, inputs, expected, share, max_new_tokens=36)
    assert torch.equal(got, expected)
    assert stats.tokens_per_step > 1.4


@pytest.mark.parametrize("kind", with_slow(KINDS[-1:], KINDS[:-1]))
def test_drawn_tokens_are_those_of_the_same_seed(kind: str) -> None:
    target, inputs = tiny_target(kind), prompt()
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 1.3, **SHORT}
    expected = written(target.model, inputs, **drawn)
    got, stats = planted(target, inputs, expected, **drawn)
    assert torch.equal(got, expected) and stats.tokens_per_step > 1.5


def test_what_is_not_absorbed_is_soon_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a drafter allows, from nothing read again to all of the text."""
    target, inputs = short_target("qwen3_next"), prompt()
    expected, rates = written(target.model, inputs), []
    for most in (0, 5, 99):
        monkeypatch.setattr(PlantedDrafter, "most_again", lambda *_, most=most: most)
        got, stats = planted(target, inputs, expected, 0.5)
        assert torch.equal(got, expected)
        rates.append(stats.tokens_per_step)
    assert rates[0] < rates[2]


@pytest.mark.slow
def test_tokens_per_forward_are_near_those_of_attention_alone() -> None:
    rates = {}
    for kind in ("llama", "qwen3_next"):
        target, steps, tokens = tiny_target(kind), 0, 0
        for seed in range(2):
            inputs = prompt(seed=seed)
            expected = written(target.model, inputs, max_new_tokens=60)
            _, stats = planted(target, inputs, expected, 0.6, max_new_tokens=60)
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


@pytest.mark.parametrize("fault", with_slow((stale, held_once), FAULTS[1:3]))
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


@pytest.mark.parametrize("fault", with_slow([stale], FAULTS[1:3]))
def test_a_state_that_is_not_put_back_is_noticed_by_the_gate(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    target = TargetModel(builder("qwen3_next")((0.15, 0.15)))
    with pytest.raises(UnsupportedArchitecture, match="keeps a recurrent state, on which"):
        capability(target)


@pytest.mark.parametrize("kind", with_slow(["nemotron_h"], ["zamba2"]))
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


@pytest.mark.parametrize(
    ("kind", "padding"),
    [
        # Rows of falcon_h1, which keeps both in each layer, end and go on below, and those of
        # qwen3_next are drawn.
        *(
            pytest.param(k, UNEQUAL, marks=[pytest.mark.slow] * (k in (*SHORTER, "falcon_h1")))
            for k in KINDS
        ),
        *(pytest.param(kind, (0, 0), marks=pytest.mark.slow) for kind in KINDS[::3]),
    ],
)
def test_planted_chains_of_a_batch_are_token_equal(kind: str, padding: tuple[int, ...]) -> None:
    target, inputs = tiny_target(kind), padded(padding, 24)
    expected = written(target.model, inputs, **SHORT)
    got, stats = planted(target, inputs, expected, **SHORT)
    assert torch.equal(got, expected)
    assert stats.tokens_per_step > 1.6


def test_drawn_tokens_of_rows_in_step_are_those_of_the_same_seed() -> None:
    target, inputs = tiny_target("qwen3_next"), padded(UNEQUAL, 24)
    drawn = SHORT | {"do_sample": True, "temperature": 1.3}
    expected = written(target.model, inputs, **drawn)
    got, stats = planted(target, inputs, expected, in_step=True, **drawn)
    assert torch.equal(got, expected) and stats.tokens_per_step > 1.6


def test_rows_that_end_leave_and_the_others_go_on() -> None:
    target, inputs = tiny_target("falcon_h1"), padded(UNEQUAL, 24)
    ends = SHORT | {
        "eos_token_id": written(target.model, inputs, **SHORT)[[0, 1], [30, 40]].tolist()
    }
    expected = written(target.model, inputs, **ends)
    assert (expected[:2, -1] == 0).all()
    assert torch.equal(planted(target, inputs, expected, **ends)[0], expected)


def test_a_single_padded_text() -> None:
    target, inputs = tiny_target("lfm2"), padded((7,), 24)
    expected = written(target.model, inputs, **SHORT)
    assert torch.equal(planted(target, inputs, expected, **SHORT)[0], expected)


def test_who_reads_without_drafts_lets_the_others_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a drafter allows; and a batch takes about as many steps as its rows alone."""
    target, inputs, rates = short_target("lfm2"), padded((0, 0, 0, 0), 24), []
    expected = written(target.model, inputs, max_new_tokens=64)
    for most in (0, 4, 12):
        monkeypatch.setattr(PlantedDrafter, "most_again", lambda *_, most=most: most)
        got, stats = planted(target, inputs, expected, 0.6, max_new_tokens=64)
        assert torch.equal(got, expected)
        rates.append(stats.tokens_per_step)
    assert rates[0] < rates[2]
    alone = {name: tensor[:1] for name, tensor in inputs.items()}
    _, stats = planted(target, alone, expected[:1], 0.6, max_new_tokens=64)
    assert rates[2] > 0.8 * stats.tokens_per_step


put_back, keep_paths = RecurrentCache.put_back, RecurrentCache.keep_paths


def all_rows_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentCache, "put_back", lambda cache, batch=None: put_back(cache))


def no_single_row_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_all(cache: RecurrentCache, batch: Any = None) -> None:
        if batch is None:
            put_back(cache)

    monkeypatch.setattr(RecurrentCache, "put_back", only_all)


def another_row_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def others(cache: RecurrentCache, batch: Any = None) -> None:
        put_back(cache, None if batch is None else [1 - b for b in batch])

    monkeypatch.setattr(RecurrentCache, "put_back", others)


OF_ROWS = (all_rows_put_back, no_single_row_put_back, another_row_put_back)


@pytest.mark.parametrize("fault", with_slow(OF_ROWS[:1], OF_ROWS[1:]))
def test_the_states_of_a_row_that_are_not_its_own_are_noticed(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: in the text, and by the gate."""
    target, inputs = short_target("qwen3_next"), padded((0, 3), 24)
    expected = written(target.model, inputs, **SHORT)
    check_batch(target, [0, 3])
    fault(monkeypatch)
    assert not torch.equal(planted(target, inputs, expected, **SHORT)[0], expected)
    fresh = TargetModel(builder("qwen3_next")((0.15, 0.15)))
    with pytest.raises(UnsupportedArchitecture, match="change each other in the recurrent state"):
        check_batch(fresh, [0, 0])


def test_padding_that_leaves_traces_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.lfm2 import modeling_lfm2

    monkeypatch.setattr(modeling_lfm2, "apply_mask_to_padding_states", lambda states, mask: states)
    target = TargetModel(builder("lfm2")((0.15, 0.15)))
    check_batch(target, [0, 0])
    with pytest.raises(
        UnsupportedArchitecture, match="leaves traces in the recurrent state of lfm2"
    ):
        check_batch(target, [0, 3])


def test_rows_that_are_compressed_together_are_refused_by_name() -> None:
    target = tiny_target("deepseek_v4")
    with pytest.raises(UnsupportedArchitecture, match="deepseek_v4 compresses tokens of all rows"):
        check_batch(target, [0, 0])
