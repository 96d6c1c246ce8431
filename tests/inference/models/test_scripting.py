"""Which texts are decoded with scripts where nobody says, and from when on."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.models import hub_form, scripting
from medusa_heads.inference.models.scripting import Scripting
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.graphs.scripted import ScriptedTarget
from medusa_heads.target.target import TargetModel
from tests.conftest import DEVICE, TinyLlama
from tests.inference.padded import padded
from tests.inference.reference import reference
from tests.pairs import with_slow
from tests.replayed import noted_sizes, text, with_heads

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's steps are recorded")

BEGINS = Scripting._begins
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 18}


@pytest.fixture(autouse=True)
def by_clock(as_they_are: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is without tests."""
    monkeypatch.setattr(Scripting, "_begins", BEGINS)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return noted_sizes(monkeypatch)


@pytest.fixture
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama()
    made.generation_config.pad_token_id = 0
    return made


def has_paid(medusa: Any) -> Scripting:
    """As if it had decoded for long, in steps of 2 ms."""
    found = Scripting.of(medusa.target)
    found.seconds, found.forwards = 100.0, 50_000
    return found


def test_nothing_is_scripted_before_it_pays(model: Any, noted: list[int]) -> None:
    free, inputs = TrainingFreeModel(model), padded([0], 12)
    expected = reference(model, **inputs, **GREEDY)
    hooks = len(model.lm_head._forward_pre_hooks)
    assert torch.equal(text(free, inputs, **GREEDY), expected)
    found = Scripting.of(free.target)
    assert found.forwards == free.last_stats.forwards > 0 and not noted
    assert type(free.target) is TargetModel and len(model.lm_head._forward_pre_hooks) == hooks
    has_paid(free)
    for _ in range(2):
        assert torch.equal(text(free, inputs, **GREEDY), expected)
    assert noted and found.forwards == 50_000
    assert len(model.lm_head._forward_pre_hooks) == hooks  # which graphs would ask for


@pytest.mark.parametrize("kind", with_slow([{"kind": "eagle3", "features": [0]}], [{}]))
def test_heads_and_drawn_text(model: Any, noted: list[int], kind: dict[str, Any]) -> None:
    medusa = with_heads(model, "auto", **kind)
    plain = MedusaModel(model, medusa.heads, compile=False)
    has_paid(medusa)
    for options in (GREEDY, {"do_sample": True, "temperature": 0.7}):
        inputs = padded([0], 12)
        assert torch.equal(text(medusa, inputs, **options), text(plain, inputs, **options))
    assert noted


@pytest.mark.parametrize(("step", "pays"), [(2e-3, True), (0.1, False)])
def test_what_saves_too_little(model: Any, step: float, pays: bool) -> None:
    """A layer saves so much, whatever the model; a large one gains nothing by that."""
    found, target = Scripting(), TargetModel(model)
    assert not found._begins(target)
    for seconds, begins in ((0.05, False), (1000.0, pays)):
        found.seconds, found.forwards = seconds, int(seconds / step)
        assert found._begins(target) is begins


def test_texts_that_are_decoded_as_they_are(model: Any, noted: list[int]) -> None:
    for options in ({"compile": False}, {"deterministic": True}, {"drafter": "early_exit:1"}):
        free, inputs = TrainingFreeModel(model, **options), padded([0], 12)
        has_paid(free)
        assert torch.equal(text(free, inputs, **GREEDY), reference(model, **inputs, **GREEDY))
    free, inputs = TrainingFreeModel(model), padded([0, 3], 12)
    found = has_paid(free)
    assert torch.equal(text(free, inputs, **GREEDY), reference(model, **inputs, **GREEDY))
    assert not noted and found.forwards == 50_000  # which batches say nothing of
    model.generation_config.max_length = None
    inputs = padded([0], 12)
    assert torch.equal(text(free, inputs, **GREEDY), reference(model, **inputs, **GREEDY))
    assert noted


def test_a_model_of_the_hub_form_is_let_go(
    tiny_llama: TinyLlama, tmp_path: Path, noted: list[int]
) -> None:
    """Scripts would keep it alive, and what it is attached to is kept as long as it lives."""
    model = tiny_llama()
    model.generation_config.pad_token_id = 0
    heads = MedusaHeads.from_target(TargetModel(model), HeadsConfig(num_heads=3))
    medusa = hub_form.attached(model, save_heads(tmp_path, heads, TargetModel(model)))
    inputs = padded([0], 12)
    for _ in range(3):
        assert torch.equal(text(medusa, inputs, **GREEDY), reference(model, **inputs, **GREEDY))
        has_paid(medusa)
    assert not noted
    gone = weakref.ref(model)
    del model, heads, medusa
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("says", ["chain", None])
def test_targets_that_no_fixed_cache_is_for(
    model: Any, noted: list[int], monkeypatch: pytest.MonkeyPatch, says: str | None
) -> None:
    """Nobody has asked for it: nothing is said, and it is not tried again."""
    tried: list[Any] = []
    capability = scripting.capability

    def other(target: TargetModel) -> Any:
        if not isinstance(target, ScriptedTarget):
            return capability(target)
        tried.append(target)
        if says is None:
            raise UnsupportedArchitecture("its mask is not known")
        return says

    monkeypatch.setattr(scripting, "capability", other)
    free, inputs = TrainingFreeModel(model), padded([0], 12)
    has_paid(free)
    for _ in range(3):
        assert torch.equal(text(free, inputs, **GREEDY), reference(model, **inputs, **GREEDY))
    assert len(tried) == 1 and not noted and Scripting.of(free.target)._scripted is None


def test_who_asks_for_it(model: Any) -> None:
    assert isinstance(TrainingFreeModel(model, compile="capture").target, ScriptedTarget)
    with pytest.raises(ValueError, match="on one NVIDIA GPU, and this one is on cpu"):
        TrainingFreeModel(model, compile="kernels")


def test_a_text_within_a_text(model: Any, noted: list[int]) -> None:
    """Which a streamer asks for, of another decoder of the same model."""
    free, inner = TrainingFreeModel(model), TrainingFreeModel(model)
    inputs, expected = padded([0], 12), reference(model, **padded([0], 12), **GREEDY)
    made: list[bool] = []

    class Asking:
        def put(self, _: Any) -> None:
            if len(made) < 3:
                made.append(torch.equal(text(inner, inputs, **GREEDY), expected))

        def end(self) -> None:
            pass

    for each in (free, inner):
        has_paid(each)
    assert torch.equal(text(free, inputs, streamer=Asking(), **GREEDY), expected)
    assert made == [True] * 3 and noted


def test_decoders_of_one_target(model: Any, noted: list[int]) -> None:
    """What one has paid for, others have: of the target as it is, not of other layers of it."""
    target, inputs = TargetModel(model), padded([0], 12)
    expected = reference(model, **inputs, **GREEDY)
    free, other = TrainingFreeModel(target), TrainingFreeModel(target, drafter="recycling")
    heads = with_heads(model, kind="eagle3", features=[0]).heads
    wide = MedusaModel(target, heads)
    has_paid(free)
    assert torch.equal(text(other, inputs, **GREEDY), expected)
    assert noted and Scripting.of(target) is Scripting.of(other.target)
    assert torch.equal(text(free, inputs, **GREEDY), expected)
    assert torch.equal(text(wide, inputs, **GREEDY), expected) and wide.last_stats.forwards
    assert Scripting.of(wide.target).forwards == wide.last_stats.forwards


def test_two_threads(model: Any, noted: list[int]) -> None:
    """The second goes without: one text at a time has the cache."""
    target, inputs = TargetModel(model), padded([0], 12)
    expected = reference(model, **inputs, **GREEDY)
    one, other = (TrainingFreeModel(target) for _ in range(2))
    has_paid(one)
    found, inside, done = Scripting.of(target), Event(), Event()

    class Waiting:
        def put(self, _: Any) -> None:
            inside.set()
            assert done.wait(60)

        def end(self) -> None:
            pass

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(text, one, inputs, streamer=Waiting(), **GREEDY)
        assert inside.wait(60)
        assert torch.equal(text(other, inputs, **GREEDY), expected)
        before = found.forwards
        assert before == 50_000 + other.last_stats.forwards
        done.set()
        assert torch.equal(first.result(), expected)
    assert found._scripted is not None and not found._scripted.is_decoding
    assert torch.equal(text(other, inputs, **GREEDY), expected)
    assert found.forwards == before
