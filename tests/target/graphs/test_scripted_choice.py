"""What is no script: what asks the host, what is done to a model, what saves nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from medusa_heads.errors import MedusaWarning
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.graphs import scripted
from medusa_heads.target.graphs.scripted import ScriptedTarget
from medusa_heads.target.target import TargetModel
from tests.conftest import DEVICE
from tests.inference.padded import padded
from tests.inference.planted import PlantedDrafter
from tests.inference.reference import reference
from tests.pairs import with_slow
from tests.replayed import text
from tests.target.graphs.test_scripted import GREEDY, decodes, known

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's forwards are recorded"),
    pytest.mark.filterwarnings("error:.*goes on without"),
]


def test_texts_that_are_decoded_as_they_are(model: Any, noted: list[int]) -> None:
    """Also where scripts are asked for: rows that end apart, hooks of others, autocast."""
    free, inputs = TrainingFreeModel(model, compile="capture"), padded([0, 3, 7], 12)
    expected = reference(model, **inputs, **GREEDY)
    free.drafter = PlantedDrafter(expected[:, 12:].tolist(), 199)
    assert decodes(free, inputs, expected)
    factor, inputs = [1.0], padded([0], 12)
    hook = model.model.layers[0].register_forward_hook(lambda _module, _given, out: out * factor[0])
    free.drafter = PlantedDrafter(expected[:1, 12:].tolist(), 199)
    for factor[0] in (1.0, -2.0):
        assert decodes(free, inputs, model.generate(**inputs, **GREEDY))
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        text(free, inputs, **GREEDY)
    assert not noted
    for _ in range(2):
        assert decodes(free, inputs, expected[:1])
    assert noted


@pytest.mark.slow
def test_adapters_in_turns(model: Any, noted: list[int]) -> None:
    """Each change of the model wants scripts anew, in the end none."""
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, lora, "one")
    adapted.add_adapter("other", lora)
    free, inputs = TrainingFreeModel(model, compile="capture"), padded([0], 12)
    for turn in range(10):
        adapted.set_adapter(("one", "other")[turn % 2])
        assert decodes(free, inputs, model.generate(**inputs, **GREEDY))
        if turn == 7:
            before = len(noted)
    assert noted and len(noted) == before


def test_what_a_script_is_worth(model: Any, noted: list[int]) -> None:
    target, forwards = ScriptedTarget(model, late=True), scripted._Forwards()
    assert target._pays(forwards)  # nothing is known
    target._saved, target._cost = 0.25, 1.0
    for spent, pays in ((3.9, False), (4.0, True)):
        forwards.spent = spent
        assert target._pays(forwards) is pays
    forwards.refused = True
    assert not target._pays(forwards)
    free, inputs = TrainingFreeModel(target), padded([0], 12)
    target._cost = 1e6
    assert decodes(free, inputs, reference(model, **inputs, **GREEDY))
    assert not noted and all(each.spent > 0 for _, each in known(target))


@pytest.mark.parametrize(
    "asks", [lambda x: x * float(x.sum() * 0 + 1), lambda x: x * torch.tensor(1.0)]
)
def test_what_is_no_script(model: Any, asks: Callable[[Tensor], Tensor]) -> None:
    """Decoding goes on; a warning says so where somebody has asked for scripts."""
    usual = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: asks(usual(x))
    free, inputs = TrainingFreeModel(model, compile="capture"), padded([0], 12)
    with pytest.warns(MedusaWarning, match="goes on without scripts: .*asks the host"):
        made = text(free, inputs, **GREEDY)
    target: Any = free.target
    assert target.gave_up
    text(free, inputs, **GREEDY)
    assert torch.equal(made, reference(model, **inputs, **GREEDY))


def test_texts_that_are_none_of_its(model: Any) -> None:
    target = ScriptedTarget(model)
    assert target.serves(1, 4096) and not target.serves(1, 4097) and not target.serves(2, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert not target.serves(1, 64)
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert not target.serves(1, 64)
    hook.remove()
    assert target.serves(1, 64)


def test_targets_that_are_never_scripted(model: Any) -> None:
    assert scripted.scripts(TargetModel(model))
    for name in ("_hf_hook", "hf_device_map", "hf_quantizer"):
        setattr(model, name, {"": "cpu"})
        assert not scripted.scripts(TargetModel(model))
        delattr(model, name)


@pytest.mark.parametrize("saved", with_slow([0.02, 0.3], [-0.5]))
def test_what_the_first_script_saves_decides(
    model: Any, monkeypatch: pytest.MonkeyPatch, saved: float
) -> None:
    times = cycle([1.0, 1.0 - saved])

    def seconds(call: Callable[[], object]) -> float:
        call()
        return next(times)

    monkeypatch.setattr(scripted, "_seconds", seconds)
    target, inputs = ScriptedTarget(model, late=True), padded([0], 12)
    free = TrainingFreeModel(target)
    expected = reference(model, **inputs, **GREEDY)
    for _ in range(3):
        assert decodes(free, inputs, expected)
    assert target.gave_up == (saved < 0.03)
