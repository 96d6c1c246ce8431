"""Forwards as scripts: the model's own text, whatever the trees; what they are not for is decoded
as it is; and nothing is scripted before it pays."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import MedusaModel
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.errors import MedusaWarning
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.machine.kernels import has_packed_products
from medusa_heads.machine.programs import Script, traced
from medusa_heads.machine.recording import standing
from medusa_heads.target.graphs import scripted
from medusa_heads.target.graphs.scripted import ScriptedTarget
from medusa_heads.target.packed import matrices
from medusa_heads.target.target import TargetModel
from scripts.prove.tiny_models import builder
from tests.conftest import DEVICE, TinyLlama
from tests.inference.padded import padded
from tests.inference.planted import BUSHY, PlainCausalDrafter, PlantedDrafter
from tests.inference.reference import reference
from tests.pairs import alternately, with_slow
from tests.replayed import text, with_heads

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's forwards are recorded"),
    pytest.mark.filterwarnings("error:.*goes on without"),
]

SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 30}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 18}
SHAPES: list[Any] = [BUSHY, BUSHY[:5], [(0,)], [(0,), (0, 0), (0, 0, 0)]]  # 17, 6, 2 and 4 nodes


def decodes(medusa: Any, inputs: Any, expected: Tensor, **options: Any) -> bool:
    return torch.equal(text(medusa, inputs, **GREEDY, **options), expected)


def test_planted_drafts_of_many_sizes(model: Any, noted: list[int]) -> None:
    """One script serves them all, as soon as two sizes have been seen."""
    target, inputs = ScriptedTarget(model), padded([0], 12)
    free = TrainingFreeModel(target)
    expected = reference(model, **inputs, **GREEDY)
    for seed in range(2):
        for shape in SHAPES:
            free.drafter = PlantedDrafter(expected[:, 12:].tolist(), 199, shape, seed=seed)
            assert decodes(free, inputs, expected)
            assert free.last_stats.tokens_per_step > 1.4
    assert not target.gave_up
    assert sorted(noted) == [6, 17]  # each step has a tree here
    proved = {nodes for _, forwards in known(target) for nodes, *_ in forwards.proved}
    assert proved == {2, 4, 6, 17}


@pytest.mark.skipif(not has_packed_products(torch.float32), reason="torch packs no matrix here")
def test_trees_of_which_only_larger_ones_are_read_by_packed_matrices(
    model: Any, noted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of four nodes and more, as on many processors: a script for these, one for others."""
    gains = {"few": 2.0}
    monkeypatch.setattr(matrices, "SMALLEST", 1)
    monkeypatch.setattr(matrices, "packed_gain", lambda *of: gains.get(of[-1], 1.0))
    monkeypatch.setattr(matrices, "turned_gain", lambda *_: 1.0)
    target, inputs = ScriptedTarget(model), padded([0], 12)
    free = TrainingFreeModel(target)
    expected = reference(model, **inputs, **GREEDY)
    for shape in (*SHAPES[1:], SHAPES[2], [(0,), (0, 0)]):  # 6, 2, 4, 2 and 3 nodes
        free.drafter = PlantedDrafter(expected[:, 12:].tolist(), 199, shape)
        assert decodes(free, inputs, expected)
    assert not target.gave_up
    assert sorted(noted) == [2, 3, 4, 6]


@pytest.mark.slow
def test_a_text_is_attended_to_as_it_grows(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a script for each number of slots, which doubles, and not to all that there are."""
    monkeypatch.setattr(scripted, "_FEWEST_SEEN", 16)
    target, inputs = ScriptedTarget(model), padded([0], 12)
    free = TrainingFreeModel(target)
    expected = reference(model, **inputs, **GREEDY)
    for shape in (SHAPES[0], SHAPES[3]):
        free.drafter = PlantedDrafter(expected[:, 12:].tolist(), 199, shape)
        assert decodes(free, inputs, expected)
    assert not target.gave_up
    assert {seen for (*_, seen), _ in known(target)} == {16, 32, 64}
    (cache,) = target._recorded
    assert cache.fixed_capacity == 512
    # Without a script, as much is seen as is in use; and of what a script sees no word is lost.
    monkeypatch.setattr(scripted, "_seen", lambda used, _: used - 1)
    wrong = ScriptedTarget(model)
    free = TrainingFreeModel(wrong)
    free.drafter = PlantedDrafter(expected[:, 12:].tolist(), 199, [(0,)])
    assert not decodes(free, inputs, expected)


@pytest.mark.parametrize(
    ("used", "capacity", "seen"),
    [(1, 512, 256), (256, 512, 256), (257, 512, 512), (1025, 1536, 1536), (1025, 4096, 2048)],
)
def test_what_is_attended_to_doubles_up_to_all(used: int, capacity: int, seen: int) -> None:
    assert scripted._seen(used, capacity) == seen


@pytest.mark.parametrize("kind", with_slow(["gemma3_text"], ["phimoe", "qwen3_moe"]))
def test_other_architectures(kind: str) -> None:
    """Windows, a norm between, experts; what is not used of a forward is another number of values
    at each size."""
    model = builder(kind)((0.15, 0.15)).float().eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    inputs = {
        "input_ids": torch.randint(3, 90, (1, 21)),
        "attention_mask": torch.ones(1, 21).long(),
    }
    target = ScriptedTarget(model)
    free = TrainingFreeModel(target)
    expected = reference(model, **inputs, **GREEDY)
    for shape in SHAPES[1:]:
        free.drafter = PlantedDrafter(expected[:, 21:].tolist(), target.vocab_size, shape)
        assert decodes(free, inputs, expected)
        assert free.last_stats.tokens_per_step > 1.4
    assert not target.gave_up


def known(target: Any) -> list[Any]:
    return [item for of_cache in target._recorded.values() for item in of_cache.items()]


def test_a_plain_causal_mask_shows(model: Any) -> None:
    free, inputs = TrainingFreeModel(ScriptedTarget(model)), padded([0], 12)
    expected = reference(model, **inputs, **GREEDY)
    free.drafter = PlainCausalDrafter(expected[:, 12:].tolist(), 199)
    assert not decodes(free, inputs, expected)


HEADS: list[dict[str, Any]] = [
    {},
    {"kind": "hydra"},
    {"kind": "eagle3", "features": [0]},
    {"kind": "eagle3", "decoder": replace(DecoderShape.of_width(64), norm_output=True)},
]


@pytest.mark.parametrize(
    ("kind", "tree"), alternately(HEADS, ("auto", "dynamic:9"), slow=[HEADS[0], *HEADS[2:]])
)
def test_heads_and_their_features(model: Any, kind: dict[str, Any], tree: str) -> None:
    heads = with_heads(model, **kind).heads
    plain = MedusaModel(model, heads, tree=tree, compile=False)
    medusa = MedusaModel(model, heads, tree=tree, compile="capture")
    inputs = padded([0], 12)
    for options in (GREEDY, SAMPLING):
        for _ in range(2):
            assert torch.equal(text(medusa, inputs, **options), text(plain, inputs, **options))
    assert any(forwards.proved for _, forwards in known(medusa.target))


def test_what_is_no_number_does_not_stay(model: Any) -> None:
    """Masked slots count for nothing only as long as they hold numbers."""
    free, inputs = TrainingFreeModel(model, compile="capture"), padded([0], 12)
    expected = reference(model, **inputs, **GREEDY)
    weight = model.model.layers[1].self_attn.v_proj.weight
    kept = weight.detach().clone()
    assert decodes(free, inputs, expected)
    with torch.no_grad():
        weight.fill_(float("nan"))
    text(free, inputs, **GREEDY)
    with torch.no_grad():
        weight.copy_(kept)
    assert decodes(free, inputs, expected)


def test_nothing_is_kept_of_what_was_noted(model: Any) -> None:
    kept: Any = torch.jit._state._python_cu
    functions = len(kept.get_functions())
    free, inputs = TrainingFreeModel(model, compile="capture"), padded([0], 12)
    text(free, inputs, **GREEDY)
    assert known(free.target) and len(kept.get_functions()) == functions


@pytest.mark.parametrize(("result", "late"), alternately((0, 1), (True, False), slow=(1,)))
def test_a_script_of_two_sizes_that_is_wrong(
    model: Any, monkeypatch: pytest.MonkeyPatch, result: int, late: bool
) -> None:
    """It is compared anew, also for sizes of which the one before was right, in all it returns."""
    with_other = Script.with_other

    class Wrong:
        size = None

        def __init__(self, script: Script) -> None:
            self._script = script

        def __call__(self, given: Any, size: int) -> list[Tensor]:
            says = self._script(given, size)
            says[result] = says[result] + (size == 17)
            return says

    monkeypatch.setattr(Script, "with_other", lambda *of: Wrong(with_other(*of)))
    monkeypatch.setattr(scripted, "_seconds", lambda call: (call(), 1.0)[1])
    monkeypatch.setattr(scripted, "LEAST_SAVED", -1.0)
    target, inputs = ScriptedTarget(model, late=late), padded([0], 12)
    free = TrainingFreeModel(target)
    expected = reference(model, **inputs, **GREEDY)
    said = nullcontext() if late else pytest.warns(MedusaWarning, match="something else than")
    with said:
        for shape in (BUSHY, BUSHY[:5], BUSHY):
            target._saved = 0.5
            target._cost = 0.0
            free.drafter = PlantedDrafter(expected[:, 12:].tolist(), 199, shape)
            assert decodes(free, inputs, expected)
    assert target.gave_up


def test_each_size_is_compared_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of the step behind the prompt, which was read outside of inference mode."""
    heads, inputs = with_heads(model).heads, padded([0], 12)
    free = MedusaModel(model, heads, tree="none", compile="capture")
    expected = reference(model, **inputs, **GREEDY)
    assert decodes(free, inputs, expected)
    ((_, forwards),) = known(free.target)
    proved = set(forwards.proved)
    assert len(proved) == 1
    monkeypatch.setattr(scripted, "_same_bits", None)  # which is not asked
    assert decodes(free, inputs, expected) and decodes(free, inputs, expected)
    assert forwards.proved == proved


def test_a_program_that_gives_a_tensor_another_shape() -> None:
    some = torch.ones(2, 3)
    with torch.no_grad():
        program = traced(lambda: [some.t_() + 1.0])
    with pytest.raises(RuntimeError, match="another shape in place"):
        scripted._Forwards().note(program, [some], 2)


def test_other_weights_in_the_same_place(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where matrices are packed, which are then others; the prompt is read without them."""
    monkeypatch.setattr("medusa_heads.target.packed.matrices.SMALLEST", 1)
    target, inputs = ScriptedTarget(model), padded([0], 40)
    free = TrainingFreeModel(target)
    texts = []
    for _ in range(3):
        expected = model.generate(**inputs, **GREEDY)
        free.drafter = PlantedDrafter(expected[:, 40:].tolist(), 199)
        assert decodes(free, inputs, expected) and decodes(free, inputs, expected)
        texts.append(expected)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.data.neg_()
            model.lm_head.weight.data.mul_(torch.linspace(-1, 1, 199)[:, None])
    assert not torch.equal(texts[0], texts[1]) and not target.gave_up


def test_another_function_in_a_models_place(model: Any) -> None:
    """What a script was made of is compared before each text."""
    free, inputs = TrainingFreeModel(ScriptedTarget(model)), padded([0], 12)
    assert decodes(free, inputs, model.generate(**inputs, **GREEDY))
    usual = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: usual(x) * 2.0
    expected = model.generate(**inputs, **GREEDY)
    assert decodes(free, inputs, expected) and decodes(free, inputs, expected)


def test_a_script_that_says_something_else(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another size than those that it was made of, say: then no further one is used."""
    call = Script.__call__

    def wrong(self: Script, given: Any, size: int) -> list[Tensor]:
        return [each + (size == 4) for each in call(self, given, size)]

    monkeypatch.setattr(Script, "__call__", wrong)
    free, inputs = TrainingFreeModel(ScriptedTarget(model)), padded([0], 12)
    expected = reference(model, **inputs, **GREEDY)
    for shape in SHAPES[:3]:
        free.drafter = PlantedDrafter(expected[:, 12:].tolist(), 199, shape)
        assert decodes(free, inputs, expected)
    free.drafter = PlantedDrafter(expected[:, 12:].tolist(), 199, SHAPES[3])
    with pytest.warns(MedusaWarning, match="says something else than the model"):
        assert decodes(free, inputs, expected)


@pytest.mark.skipif(not has_packed_products(torch.float32), reason="torch packs no matrix here")
def test_a_step_of_another_text_is_no_change_of_the_model(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it takes one, packed matrices stand in the place of the layers' own forwards."""
    monkeypatch.setattr(matrices, "SMALLEST", 1)
    target = TargetModel(tiny_llama())
    before = standing(target.model)
    assert target.packed is not None
    with torch.no_grad(), target.packed.instead(matrices.ROWS[-1]):
        assert any("forward" in vars(layer) for layer in target.model.modules())
        assert standing(target.model) == before
