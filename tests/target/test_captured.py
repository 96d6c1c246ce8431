"""Steps that are recorded as they are. On a CPU operations are noted and done again, in place of a
GPU: what a step asks of the host, or takes along from the text where it was recorded, shows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from medusa_heads import HeadsConfig, MedusaModel, TargetModel, new_heads
from medusa_heads.errors import MedusaWarning
from medusa_heads.inference.engine import device_loop
from medusa_heads.inference.models import compiling
from medusa_heads.inference.models.drafted import DraftedModel
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.machine.recording import Recording
from medusa_heads.target import captured
from medusa_heads.target.captured import CapturedTarget
from tests.conftest import DEVICE, TinyLlama
from tests.inference.engine.test_device_loop import KINDS
from tests.inference.on_device import NEW, SAMPLING, PlantedOnDevice, planted
from tests.inference.padded import padded
from tests.inference.recurrent import CHAIN, short_target
from tests.inference.reference import reference
from tests.replayed import Replayed

pytestmark = pytest.mark.filterwarnings("error:.*goes on without CUDA graphs")


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU."""
    if DEVICE == "cpu":
        monkeypatch.setattr("medusa_heads.target.packed.packed_gain", lambda *_: 0.0)
        monkeypatch.setattr(captured, "Recording", Replayed)
        monkeypatch.setattr(captured, "memory_pool", lambda: None)
        monkeypatch.setattr(captured, "records", lambda _: True)
        monkeypatch.setattr(compiling, "captures", lambda _: True)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """An entry for every recording."""
    made: list[object] = []
    recording = CapturedTarget.recording

    def counted(*args: Any) -> Any:
        made.append(recording(*args))
        return made[-1]

    monkeypatch.setattr(CapturedTarget, "recording", counted)
    return made


@pytest.fixture
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama().to(DEVICE)
    made.generation_config.pad_token_id = 0
    return made


def with_heads(model: Any, tree: str = "7", **config: Any) -> MedusaModel:
    heads = new_heads(model, HeadsConfig(num_heads=3, **config))
    return MedusaModel(model, heads, tree=tree)


def text(model: Any, inputs: Any, **options: Any) -> Tensor:
    torch.manual_seed(3)
    made = model.generate(**inputs, **{"do_sample": False, "max_new_tokens": NEW, **options})
    assert isinstance(made, Tensor)
    return made


def uncaptured(medusa: MedusaModel) -> MedusaModel:
    return MedusaModel(medusa.target.model, medusa.heads, tree="none", compile=False)


@pytest.mark.parametrize("padding", [[0], [0, 3, 7]], ids=["1 row", "3 rows"])
@pytest.mark.parametrize("truth", [[4], [0], [2, 0, 4, 1, 3]], ids=["right", "wrong", "both"])
def test_planted_drafts(model: Any, padding: list[int], truth: list[int]) -> None:
    medusa, inputs = with_heads(model), padded(padding, 12)
    assert isinstance(medusa.target, CapturedTarget)
    medusa.drafter = planted(model, inputs, truth)
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
    assert torch.equal(text(medusa, inputs), expected)
    assert medusa.last_stats.seconds["step"]
    assert (medusa.last_stats.tokens_per_step > 2) == (truth != [0])
    ends = [int(expected[0, 12 + 5]), int(expected[-1, 12 + 11])]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": ends}
    expected = reference(model, **inputs, **options)
    assert torch.equal(text(medusa, inputs, eos_token_id=ends), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", ["7", "dynamic:9", "auto"])
def test_all_kinds_of_heads(model: Any, kind: str, tree: str) -> None:
    medusa, inputs = with_heads(model, tree, **KINDS[kind]), padded([0, 3], 12)
    plain = uncaptured(medusa)
    for options in ({}, SAMPLING):
        assert torch.equal(text(medusa, inputs, **options), text(plain, inputs, **options))
        assert medusa.last_stats.seconds["step"]


@pytest.mark.parametrize("drafter", ["auto", "recycling", "recycling:5", "suffix", "lookahead"])
def test_without_training(model: Any, drafter: str) -> None:
    free, plain = TrainingFreeModel(model, drafter), TrainingFreeModel(model, compile=False)
    assert isinstance(free.target, CapturedTarget) and not isinstance(plain.target, CapturedTarget)
    inputs = padded([0, 3], 12)
    for options in ({}, SAMPLING):
        assert torch.equal(text(free, inputs, **options), text(plain, inputs, **options))


def test_a_draft_model(model: Any, tiny_llama: TinyLlama) -> None:
    draft = tiny_llama(num_layers=1).to(DEVICE)
    inputs = padded([0, 3], 12)
    for tree in ("chain:3", "auto"):
        drafted, plain = DraftedModel(model, draft, tree=tree), TrainingFreeModel(model)
        for options in ({}, SAMPLING):
            assert torch.equal(text(drafted, inputs, **options), text(plain, inputs, **options))


@pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text"])
def test_recurrent_states(kind: str) -> None:
    """Which are put back, where drafts are refused, by the recording as well."""
    model: Any = copy.deepcopy(short_target(kind).model)
    model.to(DEVICE)
    medusa, inputs = with_heads(model, "4"), padded([0, 3], 12)
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
    for truth in ([2, 0, 4, 1, 3], [4]):
        medusa.drafter = PlantedOnDevice(expected[:, 12:].tolist(), truth, CHAIN)
        for _ in range(2):
            assert torch.equal(text(medusa, inputs), expected)
            assert medusa.last_stats.seconds["step"]
            assert max(medusa.last_stats.accepted) == 4
    plain = uncaptured(medusa)
    options = {"repetition_penalty": 1.3}
    assert torch.equal(text(medusa, inputs, **options), text(plain, inputs, **options))


def test_steps_that_ask_the_host(model: Any) -> None:
    """Forwards alone are recorded, and serve all texts of their shapes."""
    medusa, inputs = with_heads(model, features=[0, 1]), padded([0, 3], 12)
    plain = uncaptured(medusa)
    for options in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2, **SAMPLING}):
        for _ in range(2):
            assert torch.equal(text(medusa, inputs, **options), text(plain, inputs, **options))
            assert "step" not in medusa.last_stats.seconds


def test_a_recording_serves_all_texts_of_its_shapes(model: Any, count: list[object]) -> None:
    medusa = with_heads(model)
    for paddings, options in ([0, 3], {}), ([1, 0], {}), ([0, 2], {"max_new_tokens": 9}):
        inputs = padded(paddings, 12)
        expected = reference(
            model, **{"do_sample": False, "max_new_tokens": NEW} | options, **inputs
        )
        assert torch.equal(text(medusa, inputs, **options), expected)
    assert len(count) == 1
    for temperature in (0.7, 1.3, 0.7):
        text(medusa, padded([0, 3], 12), do_sample=True, temperature=temperature)
    assert len(count) == 2
    for _ in range(2):
        text(medusa, padded([0, 3], 12), repetition_penalty=1.3)
    assert len(count) == 3


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=["step", "forward"])
def test_weights_may_change(
    model: Any, count: list[object], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """In place, which recordings see; or to others, for which they are made anew."""
    medusa, inputs = with_heads(model), padded([0, 3], 12)

    def is_right() -> bool:
        return torch.equal(text(medusa, inputs, **options), text(model, inputs, **options))

    assert is_right()
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight *= -1.5
    assert is_right() and len(count) == 1
    weight.data = weight.data * -0.5
    assert is_right() and len(count) == 2
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(-weight.detach())
    assert is_right() and len(count) == 3
    for module in (device_loop, captured):
        monkeypatch.setattr(module, "standing", lambda *_: ())
    assert is_right() and len(count) == 4
    weight.data = weight.data * 2.5
    assert not is_right()


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=["step", "forward"])
@pytest.mark.parametrize("change", ["adapter", "hook", "method"])
def test_the_model_may_change(model: Any, change: str, options: dict[str, Any]) -> None:
    """Between texts, by what is no weight."""
    if change == "adapter":
        settings: dict[str, Any] = {"init_lora_weights": False, "target_modules": ["down_proj"]}
        model.add_adapter(LoraConfig(r=4, lora_alpha=32, **settings))
    medusa, inputs = with_heads(model), padded([0, 3], 12)
    layer, texts = model.model.layers[0].mlp, []
    usual, negative = layer.forward, lambda *given: -usual(*given)
    hooks: list[Any] = []
    for other in (False, True, False):
        if change == "adapter":
            (model.disable_adapters if other else model.enable_adapters)()
        elif change == "method":
            layer.forward = negative if other else usual
        elif other:
            hooks.append(layer.register_forward_hook(lambda _, __, output: -output))
        elif hooks:
            hooks.pop().remove()
        for _ in range(2):
            texts.append(text(medusa, inputs, **options))
            assert torch.equal(texts[-1], text(model, inputs, **options))
    assert not torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=["step", "forward"])
def test_what_cannot_be_recorded(model: Any, options: dict[str, Any]) -> None:
    """Decoding goes on without, and says so once."""
    medusa, inputs = with_heads(model), padded([0, 3], 12)
    layer = model.model.layers[0]

    def asks(_module: Any, _args: Any, output: Any) -> None:
        float(output[0].sum() if isinstance(output, tuple) else output.sum())

    hook = layer.register_forward_hook(asks)
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs, **options)
    with pytest.warns(MedusaWarning, match="goes on without CUDA graphs"):
        assert torch.equal(text(medusa, inputs, **options), expected)
    assert torch.equal(text(medusa, inputs, **options), expected)
    hook.remove()


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=["step", "forward"])
def test_a_recording_that_does_something_else(
    model: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """It is compared with what it was made of before it is relied upon."""

    def wrong(recording: Recording) -> None:
        for tensor in recording.result or ():
            tensor.mul_(1.5)

    for kind in (Recording, Replayed):
        monkeypatch.setattr(kind, "replay", wrong)
    medusa, inputs = with_heads(model), padded([0, 3], 12)
    with pytest.warns(MedusaWarning, match="goes on without CUDA graphs: a recorded"):
        assert torch.equal(text(medusa, inputs, **options), text(model, inputs, **options))
    assert torch.equal(text(medusa, inputs, **options), text(model, inputs, **options))


def test_who_chooses(model: Any, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = new_heads(model, HeadsConfig(num_heads=3))
    assert isinstance(MedusaModel(model, heads).target, CapturedTarget)
    assert isinstance(MedusaModel(model, heads, compile="capture").target, CapturedTarget)
    for options in ({"compile": False}, {"compile": "auto"}, {"deterministic": True}):
        assert type(MedusaModel(model, heads, **options).target) is TargetModel
    assert type(TrainingFreeModel(model, "early_exit:1").target) is TargetModel
    running = MedusaModel(model, heads).running_batch(2)  # of rows that come and go
    assert type(running._target) is TargetModel
    monkeypatch.setattr(compiling, "captures", lambda _: False)
    assert type(MedusaModel(model, heads).target) is TargetModel
    with pytest.raises(ValueError, match="on one NVIDIA GPU"):
        MedusaModel(model, heads, compile="capture")
