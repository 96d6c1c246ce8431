"""Which texts are decoded by recordings, and what becomes of others."""

from __future__ import annotations

import copy
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper

from medusa_heads import HeadsConfig, MedusaModel, TargetModel, new_heads
from medusa_heads.errors import MedusaWarning
from medusa_heads.inference.engine import device_loop
from medusa_heads.inference.models import compiling
from medusa_heads.inference.models.drafted import DraftedModel
from medusa_heads.inference.models.hub_form import _HeldWeakly
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.machine.recording import Recording
from medusa_heads.target.graphs import captured
from medusa_heads.target.graphs.captured import CapturedTarget
from medusa_heads.target.graphs.compiled import CompiledTarget
from tests.conftest import DEVICE, TinyLlama
from tests.inference.on_device import NEW, SAMPLING
from tests.inference.padded import padded
from tests.inference.recurrent import tiny_target
from tests.inference.reference import reference
from tests.pairs import alternately, with_slow
from tests.replayed import Replayed, text, uncaptured, with_heads

pytestmark = [
    pytest.mark.usefixtures("recorded"),
    pytest.mark.filterwarnings("error:.*goes on without CUDA graphs"),
]


@pytest.fixture
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama().to(DEVICE)
    made.generation_config.pad_token_id = 0
    return made


@pytest.mark.parametrize(
    ("options", "compile"), alternately(({}, {"no_repeat_ngram_size": 2}), (None, "kernels"))
)
def test_what_cannot_be_recorded(model: Any, options: dict[str, Any], compile: Any) -> None:
    """Decoding goes on with forwards alone, and then as the target is; a warning says so."""
    layer = model.model.layers[0].mlp
    usual = layer.forward

    def asks(given: Tensor) -> Tensor:
        return usual(given) * float(given.sum() * 0 + 1)

    layer.forward = asks
    heads, inputs = with_heads(model).heads, padded([0, 3], 12)
    medusa = MedusaModel(model, heads, tree="7", compile=compile)
    target: Any = medusa.target
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs, **options)
    for _ in range(1 if options else 2):
        assert not target.gave_up
        with pytest.warns(MedusaWarning, match="goes on without CUDA graphs: aten.item"):
            assert torch.equal(text(medusa, inputs, **options), expected)
    assert target.gave_up
    for _ in range(2):
        assert torch.equal(text(medusa, inputs, **options), expected)
        assert "step" not in medusa.last_stats.seconds


def test_one_kind_of_processors_that_cannot_be_recorded(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are."""
    usual = MinPLogitsWarper.__call__

    def asks(self: Any, ids: Any, scores: Any) -> Any:
        return usual(self, ids, scores) * float((scores * 0).nan_to_num().sum() + 1)

    monkeypatch.setattr(MinPLogitsWarper, "__call__", asks)
    medusa, inputs = with_heads(model), padded([0, 3], 12)
    odd: dict[str, Any] = {"do_sample": True, "min_p": 0.02}
    plain = uncaptured(medusa)
    text(medusa, inputs)
    with pytest.warns(MedusaWarning, match="goes on without CUDA graphs"):
        assert torch.equal(text(medusa, inputs, **odd), text(plain, inputs, **odd))
    for options in (odd, {}, SAMPLING):
        assert torch.equal(text(medusa, inputs, **options), text(plain, inputs, **options))
        assert ("step" in medusa.last_stats.seconds) == (options is not odd)


@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 2}], ids=["step", "forward"])
def test_where_memory_is_short(
    model: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """This text is decoded without recordings, and the next one asks again."""
    medusa, inputs = with_heads(model), padded([0, 3], 12)
    make = captured.Recording

    def short(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(captured, "Recording", short)
    with pytest.warns(MedusaWarning, match="none left"):
        assert torch.equal(text(medusa, inputs, **options), text(model, inputs, **options))
    assert len(recorded) == 1  # asked for once
    monkeypatch.setattr(captured, "Recording", make)
    for _ in range(2):
        assert torch.equal(text(medusa, inputs, **options), text(model, inputs, **options))
        assert options or medusa.last_stats.seconds["step"]
    assert not medusa.target.gave_up  # type: ignore[attr-defined]


def test_hooks_of_others_are_called(model: Any, recorded: list[Any]) -> None:
    """Of layers, and of the model: their texts are not recorded."""
    medusa, inputs = with_heads(model), padded([0, 3], 12)
    calls: list[int] = []
    for module in (model.model.layers[0], model):
        hook = module.register_forward_hook(lambda *_: calls.append(1))
        assert torch.equal(text(medusa, inputs), text(model, inputs))
        hook.remove()
    assert len(calls) > 2 and not recorded
    assert torch.equal(text(medusa, inputs), text(model, inputs))
    assert recorded


def test_large_caches_are_not_announced(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    medusa, inputs, asked = with_heads(model), padded([0, 3], 12), iter(range(99))
    monkeypatch.setattr(captured, "free_memory", lambda _: (1 << 22) + 0 * next(asked))
    for _ in range(2):
        assert torch.equal(text(medusa, inputs), text(model, inputs))
        assert medusa.last_stats.seconds["step"]
    assert next(asked) <= 1  # it takes a while to find out
    end = int(text(model, inputs)[0, 14])
    stop: dict[str, Any] = {"max_new_tokens": 30000, "eos_token_id": end}
    held = sum(cache.held_bytes for cache in medusa.target._caches.values())  # type: ignore[attr-defined]
    text(medusa, padded([0], 12), **stop)
    assert "step" not in medusa.last_stats.seconds
    assert held == sum(c.held_bytes for c in medusa.target._caches.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("lengths", [(12, 20, 33, 12, 20)])
def test_prompts_of_all_lengths(model: Any, recorded: list[Any], lengths: tuple[int, ...]) -> None:
    medusa = with_heads(model)
    for length in lengths:
        inputs = padded([0, 3], length)
        assert torch.equal(text(medusa, inputs), text(model, inputs))
    assert len(recorded) == 1


def test_weights_are_not_kept(model: Any) -> None:
    """Neither those that were exchanged, once the next text has begun, nor the model itself."""
    medusa, inputs = with_heads(model), padded([0, 3], 12)
    for options in ({}, {"no_repeat_ngram_size": 2}):
        text(medusa, inputs, **options)
    weight = model.model.layers[0].mlp.down_proj.weight

    old = weight.data_ptr()
    held = [each._held for each in recordings(medusa)]
    assert held and not any(old in each for each in held)


def recordings(medusa: MedusaModel) -> list[Any]:
    target: Any = medusa.target
    of_steps = [
        one.recording
        for drafters in device_loop._loops[target]._recorded.values()
        for known in drafters.values()
        for one in known.values()
    ]
    of_forwards = [one._recording for known in target._recorded.values() for one in known.values()]
    return [*of_steps, *of_forwards]


@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 2}], ids=["step", "forward"])
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
    for _ in range(1 if options else 2):  # of whole steps, and then of forwards
        with pytest.warns(MedusaWarning, match="goes on without CUDA graphs: a recorded"):
            assert torch.equal(text(medusa, inputs, **options), text(model, inputs, **options))
    assert torch.equal(text(medusa, inputs, **options), text(model, inputs, **options))


@pytest.mark.parametrize("kind", with_slow(["mamba"], ["gpt_neo", "deepseek_v32"]))
@pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")
def test_targets_that_no_fixed_cache_is_for(kind: str) -> None:
    """They are decoded as they are."""
    model: Any = copy.deepcopy(tiny_target(kind).model)
    model.to(DEVICE)
    free = TrainingFreeModel(model, "suffix")
    assert type(free.target) is TargetModel
    assert torch.equal(text(free, padded([0], 12)), text(model, padded([0], 12)))


def test_within_autocast(model: Any, recorded: list[Any]) -> None:
    medusa, inputs = with_heads(model), padded([0, 3], 12)
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        text(medusa, inputs)
    assert not recorded


def test_views_of_one_model_in_two_threads(model: Any) -> None:
    """They have caches of their own, and each reads its own hidden states; what shares a view takes
    turns."""
    first, inputs = with_heads(model), [padded([0], 12), padded([0, 3], 12)]
    expected = [text(model, each) for each in inputs]
    for second in (with_heads(model), MedusaModel(first.target, first.heads, tree="7")):
        right: list[bool] = []

        def work(medusa: MedusaModel, number: int, right: list[bool] = right) -> None:
            for _ in range(2):
                right.append(torch.equal(text(medusa, inputs[number]), expected[number]))

        threads = [Thread(target=work, args=pair) for pair in ((first, 0), (second, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert right == [True] * 4


def test_the_model_is_not_kept(model: Any) -> None:
    held = _HeldWeakly(model)
    assert compiling.usual_target(held) is held


def test_a_text_within_a_text(model: Any, cache: Path) -> None:
    """A streamer asks for another one of the same target, or measures it."""
    medusa, inputs = with_heads(model), padded([0], 12)
    other = TrainingFreeModel(medusa.target, "suffix")
    expected = text(model, inputs)
    made: list[Tensor] = []

    class Asking:
        def put(self, tokens: Tensor) -> None:
            if tokens.shape[0] == 1 and len(made) < 2:
                made.append(text(other, inputs))
                MedusaModel(model, medusa.heads, tree="auto")

        def end(self) -> None:
            pass

    assert torch.equal(text(medusa, inputs, streamer=Asking()), expected)
    assert made and all(torch.equal(each, expected) for each in made)


@pytest.mark.slow
def test_a_draft_model_that_was_a_target(model: Any, tiny_llama: TinyLlama) -> None:
    draft = TrainingFreeModel(tiny_llama(num_layers=1).to(DEVICE)).target
    assert isinstance(draft, CapturedTarget)
    inputs = padded([0, 3], 12)
    for tree in ("chain:3", "auto"):
        drafted = DraftedModel(model, draft, tree=tree)
        assert torch.equal(text(drafted, inputs), text(model, inputs))


@pytest.mark.slow
def test_it_is_compiled_besides(model: Any) -> None:
    """The hooks of the one are no obstacle to the other."""
    medusa, inputs = with_heads(model), padded([0, 3], 12)
    text(medusa, inputs)
    options: dict[str, Any] = {"compile": True, "compile_backend": "eager", "tree": "7"}
    compiled = MedusaModel(model, medusa.heads, **options)
    assert torch.equal(text(compiled, inputs), text(model, inputs))


def test_what_was_chosen_may_be_unchosen(model: Any) -> None:
    medusa = with_heads(model)
    assert isinstance(medusa.target, CapturedTarget)
    heads = medusa.heads
    assert type(MedusaModel(medusa.target, heads, compile=False).target) is TargetModel
    assert type(MedusaModel(medusa.target, heads, compile="steps").target) is CompiledTarget
    assert type(TrainingFreeModel(medusa.target, "early_exit:1").target) is TargetModel


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
        MedusaModel(model, heads, compile="kernels")
