"""Steps that are recorded as they are. On a CPU operations are noted and done again, in place of a
GPU: what a step asks of the host, or takes along from the text where it was recorded, shows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from medusa_heads import MedusaModel
from medusa_heads.errors import MedusaWarning
from medusa_heads.inference.engine import device_loop
from medusa_heads.inference.models.drafted import DraftedModel
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.graphs import captured
from medusa_heads.target.graphs.captured import CapturedTarget
from tests.conftest import DEVICE, TinyLlama
from tests.inference.engine.test_device_loop import KINDS
from tests.inference.on_device import NEW, SAMPLING, PlantedOnDevice, planted
from tests.inference.padded import padded
from tests.inference.recurrent import CHAIN, short_target
from tests.inference.reference import reference
from tests.pairs import alternately, with_slow
from tests.replayed import text, uncaptured, with_heads

pytestmark = [
    pytest.mark.usefixtures("recorded"),
    pytest.mark.filterwarnings("error:.*goes on without CUDA graphs"),
]


# Heads that draft as another kind does, or whose steps on the device another test compares.
ALIKE = tuple(kind for kind in KINDS if kind not in ("medusa", "prefix", "block"))
FEW: dict[str, Any] = {"max_new_tokens": 12}  # a CPU does one operation after the other again
# A whole step is recorded; and forwards alone, where the step asks the host.
HOW: list[dict[str, Any]] = [{}, {"no_repeat_ngram_size": 2}]


@pytest.fixture
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama().to(DEVICE)
    made.generation_config.pad_token_id = 0
    return made


@pytest.mark.parametrize(
    ("padding", "truth"), alternately(([0], [0, 3, 7]), ([4], [2, 0, 4, 1, 3], [0]))
)
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


@pytest.mark.parametrize(("kind", "drawn"), alternately(KINDS, (False, True), slow=ALIKE))
def test_all_kinds_of_heads(model: Any, kind: str, drawn: bool) -> None:
    """Greedy by one kind of tree, drawn by another."""
    number, inputs = list(KINDS).index(kind), padded([0, 3], 12)
    auto = drawn == (number // 2 % 2 == 1)
    tree = "auto" if auto else ("7", "dynamic:9")[number % 2]
    medusa, options = with_heads(model, tree, **KINDS[kind]), FEW | (SAMPLING if drawn else {})
    plain = uncaptured(medusa)
    assert torch.equal(text(medusa, inputs, **options), text(plain, inputs, **options))
    assert medusa.last_stats.seconds["step"]


@pytest.mark.parametrize(
    "drafter", with_slow(["recycling"], ["auto", "recycling:5", "suffix", "lookahead"])
)
def test_without_training(model: Any, drafter: str) -> None:
    free, plain = TrainingFreeModel(model, drafter), TrainingFreeModel(model, compile=False)
    assert isinstance(free.target, CapturedTarget) and not isinstance(plain.target, CapturedTarget)
    inputs = padded([0, 3], 12)
    for options in ({}, FEW | SAMPLING):
        assert torch.equal(text(free, inputs, **options), text(plain, inputs, **options))


@pytest.mark.parametrize(
    ("tree", "drawn"), alternately(("auto", "chain:3"), (False, True), slow=("chain:3",))
)
def test_a_draft_model(model: Any, tiny_llama: TinyLlama, tree: str, drawn: bool) -> None:
    draft, options = tiny_llama(num_layers=1).to(DEVICE), FEW | (SAMPLING if drawn else {})
    drafted, plain = DraftedModel(model, draft, tree=tree), uncaptured(with_heads(model))
    inputs = padded([0, 3], 12)
    assert torch.equal(text(drafted, inputs, **options), text(plain, inputs, **options))


@pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")
@pytest.mark.parametrize("kind", with_slow(["lfm2"], ["qwen3_5_text"]))
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
    options = {"no_repeat_ngram_size": 2}
    assert torch.equal(text(medusa, inputs, **options), text(plain, inputs, **options))


def test_steps_that_ask_the_host(model: Any) -> None:
    """Forwards alone are recorded, and serve all texts of their shapes."""
    medusa, inputs = with_heads(model, features=[0, 1]), padded([0, 3], 12)
    plain = uncaptured(medusa)
    for options in ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2, **SAMPLING}):
        for _ in range(2):
            assert torch.equal(text(medusa, inputs, **options), text(plain, inputs, **options))
            assert "step" not in medusa.last_stats.seconds


def test_a_recording_serves_all_texts_of_its_shapes(model: Any, recorded: list[Any]) -> None:
    medusa = with_heads(model)
    for paddings, options in ([0, 3], {}), ([1, 0], {}), ([0, 2], {"max_new_tokens": 9}):
        inputs = padded(paddings, 12)
        expected = reference(
            model, **{"do_sample": False, "max_new_tokens": NEW} | options, **inputs
        )
        assert torch.equal(text(medusa, inputs, **options), expected)
    assert len(recorded) == 1
    for temperature in (0.7, 1.3, 0.7):
        text(medusa, padded([0, 3], 12), do_sample=True, temperature=temperature)
    assert len(recorded) == 2
    for _ in range(2):
        text(medusa, padded([0, 3], 12), no_repeat_ngram_size=2)
    assert len(recorded) == 3


@pytest.mark.parametrize("options", with_slow(HOW[:1], HOW[1:]), ids=["step", "forward"])
def test_weights_may_change(
    model: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """In place, which recordings see; or to others, for which they are made anew."""
    medusa, inputs, options = with_heads(model), padded([0, 3], 12), FEW | options

    def is_right() -> bool:
        return torch.equal(text(medusa, inputs, **options), text(model, inputs, **options))

    assert is_right()
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight *= -1.5
    assert is_right() and len(recorded) == 1
    weight.data = weight.data * -0.5
    assert is_right() and len(recorded) == 2
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(-weight.detach())
    assert is_right() and len(recorded) == 3
    for module in (device_loop, captured):
        monkeypatch.setattr(module, "standing", lambda *_: ())
    assert is_right() and len(recorded) == 4
    weight.data = weight.data * 2.5
    assert not is_right()


@pytest.mark.parametrize(
    ("change", "options"), alternately(("adapter", "hook", "method"), HOW, slow=("hook", "method"))
)
def test_the_model_may_change(model: Any, change: str, options: dict[str, Any]) -> None:
    """Between texts, by what is no weight."""
    if change == "adapter":
        settings: dict[str, Any] = {"init_lora_weights": False, "target_modules": ["down_proj"]}
        adapter: Any = get_peft_model(model, LoraConfig(r=4, lora_alpha=32, **settings)).base_model
    medusa, inputs, options = with_heads(model), padded([0, 3], 12), FEW | options
    layer, texts = model.model.layers[0].mlp, []
    usual, negative = layer.forward, lambda *given: -usual(*given)
    hooks: list[Any] = []
    for other in (False, True, False):
        if change == "adapter":
            (adapter.disable_adapter_layers if other else adapter.enable_adapter_layers)()
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


@pytest.mark.parametrize(
    ("what", "options"),
    alternately(("method", "setting", "class", "function"), HOW, slow=("class", "function")),
)
def test_what_is_exchanged_and_gone(model: Any, what: str, options: dict[str, Any]) -> None:
    """So that another may lie where it lay."""
    layer = model.model.layers[0].mlp
    usual = type(layer).forward
    layer.scale, model.config.own_scale = torch.negative, 1.0
    if what in ("function", "setting"):
        layer.forward = lambda given: layer.scale(usual(layer, given)) * model.config.own_scale
    medusa, inputs, options = with_heads(model), padded([0, 3], 12), FEW | options
    try:
        for number in (0.5, 2.0, -1.0):
            if what == "method":
                layer.forward = lambda given, number=number: usual(layer, given) * number
            elif what == "class":
                type(layer).forward = lambda self, given, number=number: usual(self, given) * number
            elif what == "function":
                layer.scale = lambda given, number=number: given * number
            else:
                model.config.own_scale = number
            assert torch.equal(text(medusa, inputs, **options), text(model, inputs, **options))
    finally:
        type(layer).forward = usual


def test_new_kinds_of_processors_leave_others(model: Any, recorded: list[Any]) -> None:
    medusa, inputs = with_heads(model), padded([0, 3], 12)
    text(medusa, inputs)
    for top_k in (5, 10):
        text(medusa, inputs, do_sample=True, top_k=top_k)
    before = len(recorded)
    text(medusa, inputs, do_sample=True, top_k=5)
    model.generation_config.temperature = 0.3  # of which greedy text knows nothing
    text(medusa, inputs)
    assert len(recorded) == before


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        ("7", SAMPLING),
        pytest.param("auto", {}, marks=pytest.mark.slow),
        pytest.param("7", {"no_repeat_ngram_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_compiled_parts(deep: Any, tree: str, options: dict[str, Any]) -> None:
    """A step is recorded as it is, and then with fewer kernels, found to do the same."""
    made: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        made.append(module)
        return module

    inputs, heads = padded([0, 3], 12), with_heads(deep).heads
    medusa = MedusaModel(deep, heads, tree=tree, compile="kernels", compile_backend=backend)
    expected = text(uncaptured(medusa), inputs, **options)
    for _ in range(3):
        assert torch.equal(text(medusa, inputs, **options), expected)
    whole = "no_repeat_ngram_size" not in options  # or forwards alone are recorded
    steps = [one for each in steps_of(medusa) for one in each.values()] if whole else []
    assert made and bool(steps) == whole and all(one.serves and one.is_last for one in steps)


@pytest.mark.parametrize(
    ("fails", "options"), alternately(("compiling", "recording"), HOW, slow=("recording",))
)
def test_parts_that_cannot_be_compiled(deep: Any, fails: str, options: dict[str, Any]) -> None:
    """Their kernels stay as they are, recorded."""

    def backend(module: Any, examples: Any) -> Any:
        calls = [module]  # and then none
        if fails == "compiling":
            raise RuntimeError("no compiler here")
        return lambda *given: calls.pop()(*given)

    inputs, heads = padded([0, 3], 12), with_heads(deep).heads
    medusa = MedusaModel(deep, heads, tree="7", compile="kernels", compile_backend=backend)
    expected = reference(deep, do_sample=False, max_new_tokens=NEW, **inputs, **options)
    with pytest.warns(MedusaWarning, match="goes on by kernels as they are"):
        assert torch.equal(text(medusa, inputs, **options), expected)
    assert torch.equal(text(medusa, inputs, **options), expected)
    target: Any = medusa.target
    assert not target.gave_up and bool(medusa.last_stats.seconds.get("step")) == (not options)
    assert [one for known in target._recorded.values() for one in known] or not options


def steps_of(medusa: MedusaModel) -> list[dict[Any, Any]]:
    loop = device_loop._loops[medusa.target]
    return [known for drafters in loop._recorded.values() for known in drafters.values()]
