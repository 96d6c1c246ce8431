"""A repetition penalty in steps that ask the host nothing: generate()'s tokens."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from medusa_heads import MedusaModel, TargetModel
from medusa_heads.inference.acceptance import at_once
from medusa_heads.inference.engine.device_state import DeviceState
from medusa_heads.inference.models.training_free import TrainingFreeModel
from tests import replayed
from tests.conftest import DEVICE, TinyLlama
from tests.inference.on_device import NEW, SAMPLING, PlantedOnDevice, text, with_heads
from tests.inference.padded import padded
from tests.inference.reference import reference

BATCHES = ([0], [0, 3, 7])  # padding of each row
PENALTY: dict[str, Any] = {"repetition_penalty": 1.5}


@pytest.fixture(scope="module")
def medusa(tiny_llama: TinyLlama) -> MedusaModel:
    return with_heads(tiny_llama(pad_token_id=0).to(DEVICE))


@pytest.fixture(scope="module")
def model(medusa: MedusaModel) -> Any:
    return medusa.target.model


def penalised(model: Any, medusa: MedusaModel, inputs: Any, truth: list[int]) -> Tensor:
    """What generate() makes of it, which is planted."""
    options = {"do_sample": False, "max_new_tokens": NEW + 9, **PENALTY}
    whole = reference(model, **inputs, **options)
    medusa.drafter = PlantedOnDevice(whole[:, 12:].tolist(), truth)
    return whole[:, : 12 + NEW]


@pytest.mark.parametrize(
    "padding",
    [pytest.param(BATCHES[0], marks=pytest.mark.slow), BATCHES[1]],
    ids=["1 row", "3 rows"],
)
def test_planted_drafts(model: Any, medusa: MedusaModel, padding: list[int]) -> None:
    inputs = padded(padding, 12)
    expected = penalised(model, medusa, inputs, [2, 0, 4, 1, 3])
    assert torch.equal(text(medusa, inputs, **PENALTY), expected)
    stats = medusa.last_stats
    assert stats.seconds["step"] and max(stats.accepted) == 4
    other = {"repetition_penalty": 0.8}  # in the same graph
    plain = reference(model, **inputs, do_sample=False, max_new_tokens=NEW)
    for options in (other, {}, PENALTY):
        right = reference(model, **inputs, do_sample=False, max_new_tokens=NEW, **options)
        assert torch.equal(text(medusa, inputs, **options), right)
        assert torch.equal(right, plain) == (options == {})


@pytest.mark.parametrize("forgotten", ["path", "step", "prompt"])
def test_negative_controls(
    model: Any, medusa: MedusaModel, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = padded([0, 3, 7], 12)
    expected = penalised(model, medusa, inputs, [4] if forgotten == "path" else [0])
    take, seen = DeviceState.take, DeviceState._seen

    def forgetting(state: DeviceState, *given: Any) -> None:
        before, state.seen_BV = state.seen_BV, None
        take(state, *given)
        state.seen_BV = before

    if forgotten == "path":
        monkeypatch.setattr(
            at_once,
            "_seen_behind",
            lambda tree, seen_BV: seen_BV[:, None].expand(-1, tree.num_nodes, -1),
        )
    elif forgotten == "step":
        monkeypatch.setattr(DeviceState, "take", forgetting)
    else:
        monkeypatch.setattr(DeviceState, "_seen", lambda *given: seen(*given).zero_())
    assert not torch.equal(text(medusa, inputs, **PENALTY), expected)


@pytest.mark.parametrize(
    "padding",
    [pytest.param(BATCHES[0], marks=pytest.mark.slow), BATCHES[1]],
    ids=["1 row", "3 rows"],
)
def test_drawn_text_is_that_of_steps_which_ask_the_host(
    model: Any, medusa: MedusaModel, padding: list[int]
) -> None:
    inputs: Any = padded(padding, 12)
    asking = MedusaModel(model, medusa.heads, tree="none", compile=False)
    options: dict[str, Any] = {"max_new_tokens": NEW, **SAMPLING, **PENALTY}
    torch.manual_seed(3)
    expected: Any = asking.generate(**inputs, **options)
    for tree in ("7", "auto"):
        medusa.use_tree(tree)
        assert torch.equal(text(medusa, inputs, **options), expected)
        assert medusa.last_stats.seconds["step"]
    assert not torch.equal(text(medusa, inputs, max_new_tokens=NEW, **SAMPLING), expected)


@pytest.mark.parametrize("ignored", [8, 12, 13, 20])
def test_a_penalty_of_a_part_of_the_text(model: Any, medusa: MedusaModel, ignored: int) -> None:
    """One that leaves out tokens still to come asks the host."""
    inputs: Any = padded([0], 12)
    medusa.use_tree("7")
    own = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=ignored)])
    expected = model.generate(
        **inputs, do_sample=False, max_new_tokens=NEW, logits_processor=LogitsProcessorList(own)
    )
    assert torch.equal(text(medusa, inputs, logits_processor=own), expected)
    assert ("step" in medusa.last_stats.seconds) == (ignored <= 12)


def test_lengths_below_zero_leave_out_nothing(model: Any, medusa: MedusaModel) -> None:
    inputs: Any = padded([0, 3], 12)
    lengths = torch.tensor([-4, -1], device=DEVICE)
    try:
        penalty = RepetitionPenaltyLogitsProcessor(1.9, prompt_ignore_length=lengths)
    except ValueError:
        pytest.skip("in this version of transformers rows share one length")
    own = LogitsProcessorList([penalty])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "logits_processor": own}
    assert torch.equal(text(medusa, inputs, **options), model.generate(**inputs, **options))


def test_ids_beyond_the_head(tiny_llama: TinyLlama) -> None:
    """A prompt may have tokens that can only be read, and the text's continuation drafts them."""
    model = tiny_llama(pad_token_id=0)
    more = torch.nn.Embedding(230, 64)
    more.weight.data[:199] = model.model.embed_tokens.weight.data
    model.model.embed_tokens = more
    inputs: Any = padded([0, 3], 12)
    inputs["input_ids"][:, [6, 8, 10]] = torch.tensor([21, 210, 21], device=DEVICE)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, **PENALTY}
    try:
        expected = model.to(DEVICE).generate(**inputs, **options)
    except (IndexError, RuntimeError):
        pytest.skip("this version of transformers takes no such prompt")
    assert TargetModel(model).readable == 230
    for kind, tree in product(({}, {"correction_rank": 8}), ("7", "7+suffix", "auto")):
        medusa = with_heads(model, **kind)
        medusa.use_tree(tree)
        assert torch.equal(text(medusa, inputs, **PENALTY), expected)
        assert medusa.last_stats.seconds["step"]
    for drafter in ("recycling:5", "auto"):
        free = TrainingFreeModel(model, drafter, compile="steps", compile_backend="eager")
        assert torch.equal(text(free, inputs, **PENALTY), expected)


@pytest.mark.parametrize("compile", [None, pytest.param("kernels", marks=pytest.mark.slow)])
def test_recorded_steps(model: Any, recorded: list[Any], compile: Any) -> None:
    """One recording serves all penalties, and another one no penalty, whatever comes in between."""
    inputs: Any = padded([0, 3, 7], 12)
    heads = replayed.with_heads(model).heads
    medusa = MedusaModel(model, heads, tree="7", compile=compile)
    for _ in range(4):
        for options in ({"repetition_penalty": 0.8}, {}, PENALTY):
            right = reference(model, **inputs, do_sample=False, max_new_tokens=NEW, **options)
            assert torch.equal(replayed.text(medusa, inputs, **options), right)
            assert medusa.last_stats.seconds["step"]
    assert len(recorded) == (2 if compile is None else 4)  # which are recorded with parts again
