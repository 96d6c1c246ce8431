"""Early exit: drafts are what the thinned target says, and its cache is left as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, MixtralConfig

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters.extra import early_exit
from medusa_heads.inference.drafters.extra.early_exit import (
    EarlyExitSource,
    ExitClock,
    ThinnedTarget,
)
from medusa_heads.inference.drafters.extra.layer_stack import LayerStack
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.inference.plan import adaptive as adaptive_plan
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree
from scripts.prove.seeing.models import build, prompts
from scripts.prove.seeing.texts import both
from tests.conftest import DEVICE, TinyLlama
from tests.inference.drafters.extra.thinned import STEPS, drafted, layered, read_state
from tests.inference.drafters.growing import grow
from tests.inference.padded import padded
from tests.inference.planted import PlantedDrafter
from tests.inference.reference import reference
from tests.pairs import alternately, with_slow

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 50, "pad_token_id": 0}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which layers a model can do without is tried once."""
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(autouse=True)
def drafting_pays(monkeypatch: pytest.MonkeyPatch, measured: Path) -> None:
    """A machine on which drafting pays, as it does not on a model this small."""
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(measured))
    clock = Clock(STEPS, learns=False)
    exits = ExitClock(clock, layers=5, first=0.05)
    monkeypatch.setattr(ExitClock, "measured", lambda *_: exits)
    monkeypatch.setattr(adaptive_plan, "target_clock", lambda *_: clock)


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    return layered(tiny_llama)


def inputs(rows: int) -> dict[str, Any]:
    return padded((0, 4, 7, 2)[:rows], 11)


def test_first_layers_draft_what_they_would_write_alone(model: Any) -> None:
    """The rows that the first layers find in the cache are those that they would have written."""
    alone = copy.deepcopy(model)
    alone.model.layers = nn.ModuleList(alone.model.layers[:2])
    alone.config.num_hidden_layers = 2
    given = inputs(4)
    expected_BT = alone.generate(**given, do_sample=False, max_new_tokens=6, pad_token_id=0)
    target = TargetModel(model)
    state = read_state(target, given["input_ids"], given["attention_mask"])
    levels = drafted(target, state, range(2, 5), 6)
    assert torch.equal(torch.tensor(levels).T, expected_BT[:, 11:].cpu())


def test_all_layers_draft_the_text_itself(model: Any) -> None:
    given = inputs(3)
    expected_BT = reference(model, **given, do_sample=False, max_new_tokens=6, pad_token_id=0)
    target = TargetModel(model)
    state = read_state(target, given["input_ids"], given["attention_mask"])
    levels = drafted(target, state, [], 6)
    assert torch.equal(torch.tensor(levels).T, expected_BT[:, 11:].cpu())


def test_all_layers_draft_the_text_behind_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take fewer positions than tokens."""
    target, plan, compared = TargetModel(build("qwen3_vl")), PlantedDrafter.propose, 0

    def propose(drafter: PlantedDrafter, state: DecodingState) -> TokenTree:
        nonlocal compared
        texts = zip(*drafted(target, state, [], 3), strict=True)
        for row, said in zip(state.rows, texts, strict=True):
            truth = drafter.truth(row)[len(row.tokens) :][:3]
            assert list(said)[: len(truth)] == truth
            compared += len(truth)
        return plan(drafter, state)

    monkeypatch.setattr(PlantedDrafter, "propose", propose)
    both(target, prompts("qwen3_vl", 3, seed=1), 20, do_sample=False)
    assert compared > 20


def test_the_cache_is_left_as_it_was(model: Any) -> None:
    target = TargetModel(model)
    given = inputs(3)
    state = read_state(target, given["input_ids"], given["attention_mask"])
    layers = state.cache.row_layers
    before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    unread = layers[3]._stacks.buffer(layers[3]._members[0]).clone()
    drafted(target, state, (1, 3), 4)
    assert unread.shape[2] > 10 + 4  # so there was room to write into
    assert torch.equal(layers[3]._stacks.buffer(layers[3]._members[0]), unread)
    for layer, (keys, values) in zip(layers, before, strict=True):
        assert layer.length == 10
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)


@pytest.mark.parametrize(
    ("drafter", "options"),
    alternately(
        ("early_exit", "early_exit:2", "early_exit:1+suffix"),
        (
            {"do_sample": False},
            {"do_sample": True, "temperature": 0.3, "top_k": 0},
            {"do_sample": False, "repetition_penalty": 1.2},
        ),
    ),
)
def test_equals_generate(model: Any, drafter: str, options: dict[str, Any]) -> None:
    given = inputs(1)
    drafting = TrainingFreeModel(model, drafter, rng="transformers")
    torch.manual_seed(3)
    expected_BT = reference(model, **given, max_new_tokens=40, **options)
    torch.manual_seed(3)
    got_BT: Any = drafting.generate(**given, max_new_tokens=40, **options)
    assert torch.equal(got_BT, expected_BT)
    # What is drawn is another text on another device: some are harder to guess.
    drawn_elsewhere = DEVICE != "cpu" and options["do_sample"]
    assert drafting.last_stats.tokens_per_step > (1.1 if drawn_elsewhere else 1.3)


def test_rows_of_a_batch_equal_generate(model: Any) -> None:
    given = inputs(4)
    options = GREEDY | {"eos_token_id": 2}
    expected_BT = reference(model, **given, **options)
    for drafter in ("early_exit", "early_exit:2", "early_exit:2+suffix"):
        drafting = TrainingFreeModel(model, drafter)
        got_BT: Any = drafting.generate(**given, **options)
        assert torch.equal(got_BT, expected_BT)
        assert drafting.last_stats.tokens_per_step > 1.3


class Leaking(ThinnedTarget):
    """Negative control: drafts are written one slot too early, over the text's last row."""

    def continuation(self, state: DecodingState) -> Any:
        state.lengths = [length - 1 for length in state.lengths]
        try:
            yield from super().continuation(state)
        finally:
            state.lengths = [length + 1 for length in state.lengths]


def test_a_cache_that_is_not_left_as_it_was_is_caught(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(1)
    expected_BT = reference(model, **given, **GREEDY)
    got_BT: Any = TrainingFreeModel(model, "early_exit:2").generate(**given, **GREEDY)
    assert torch.equal(got_BT, expected_BT)
    monkeypatch.setattr(early_exit, "ThinnedTarget", Leaking)
    got_BT = TrainingFreeModel(model, "early_exit:2").generate(**given, **GREEDY)
    assert not torch.equal(got_BT, expected_BT)


class Saying(ThinnedTarget):
    """Gives its tokens these probabilities, one after the other."""

    def __init__(self, *probs: float) -> None:
        self.probs, self.asked, self.layers = probs, 0, 1

    layers, facts = 1, {}

    def continuation(self, state: DecodingState) -> Any:
        for prob in self.probs:
            self.asked += 1
            yield [[7]] * len(state.rows), [[prob]] * len(state.rows)


@pytest.mark.parametrize(
    ("token", "probs", "length"),
    [
        (0.05, [0.9] * 9, 9),  # cheap and sure: to the end
        (0.05, [0.99, 0.9, 0.05, 0.9], 3),  # what stands behind an unlikely token gains nothing
        (0.9, [0.9] * 9, 1),  # nearly as dear as the target's own tokens
    ],
)
def test_a_chain_ends_where_the_next_token_gains_less_than_it_takes(
    model: Any, token: float, probs: list[float], length: int
) -> None:
    thinned = Saying(*probs)
    source = EarlyExitSource(thinned, ExitClock(Clock(STEPS, learns=False), 5, token), most=9)
    ids_BT = torch.tensor([[5, 6, 7]], device=DEVICE)
    state = read_state(TargetModel(model), ids_BT, torch.ones_like(ids_BT))
    state.rows[0].tokens.append(7)
    (proposal,) = source.draft(state)
    assert len(grow(7, [proposal], most=20)) - 1 == thinned.asked == length


def test_a_token_takes_longer_with_more_layers_and_rows() -> None:
    clock = ExitClock(Clock({1: 1.0, 2: 1.5}, learns=False), layers=5, first=0.2)
    assert [clock.token(layers) for layers in (1, 3, 5)] == pytest.approx([0.2, 0.6, 1.0])
    assert clock.token(1, rows=2) == pytest.approx(0.3)


def test_a_draft_of_one_layer_is_measured(tiny_llama: TinyLlama, monkeypatch: Any) -> None:
    monkeypatch.undo()
    target = TargetModel(tiny_llama(num_layers=3))
    clock = ExitClock.measured(target, LayerStack(target))
    assert 0 < clock.token(1) <= clock.token(2) <= clock.steps.step(1) * 1.01


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (GPT2Config, {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64}),
    # Verifies chains of one unpadded text alone, and its layers return more than hidden states.
    "bloom": (BloomConfig, {"hidden_size": 32, "n_layer": 3, "n_head": 2}),
    "mixtral": (
        MixtralConfig,
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 3,  # as many as there are layers
            "max_position_embeddings": 64,
            "sliding_window": 8,
        },
    ),
}


@pytest.mark.filterwarnings("ignore:bloom verifies a chain")
@pytest.mark.parametrize("kind", with_slow(["gpt2", "bloom"], ["mixtral"]))
def test_other_architectures(kind: str) -> None:
    made_by, sizes = OTHERS[kind]
    config = made_by(vocab_size=24, bos_token_id=None, eos_token_id=None, **sizes)
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
    given = inputs(1 if kind == "bloom" else 3)
    options = GREEDY | {"max_new_tokens": 53}  # up to the last position that there is
    expected_BT = made.generate(**given, **options)
    drafting = TrainingFreeModel(made, "early_exit:2")
    got_BT: Any = drafting.generate(**given, **options)
    assert torch.equal(got_BT, expected_BT)
    assert drafting.last_stats.tokens_per_step > 1


def test_layers_that_are_none_are_refused(model: Any, tiny_llama: TinyLlama) -> None:
    assert TrainingFreeModel(model, "early_exit:2").skipped_layers == (2, 3, 4)
    with pytest.raises(ValueError, match="keeps at least 1 of the target's 5 layers"):
        TrainingFreeModel(model, "early_exit:5")
    with pytest.raises(ValueError, match="leave compile out"):
        TrainingFreeModel(tiny_llama(), "early_exit", compile=True, compile_backend="eager")
    with pytest.raises(ValueError, match="calibration is of the drafter 'early_exit'"):
        TrainingFreeModel(model, "suffix", calibration=torch.tensor([[1, 2]]))


@pytest.mark.parametrize(
    ("calibration", "sentence"),
    [
        (torch.rand(2, 8), "got torch.float32 of shape"),
        (torch.ones(2, 8, dtype=torch.bool), "got torch.bool of shape"),
        (torch.ones(1, 65, dtype=torch.long), r"65 tokens \(calibration\) do not fit"),
        ([[1, 2]], r"got list of shape \[\]"),
    ],
)
def test_calibration_that_is_none_is_refused(
    model: Any, calibration: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "max_position_embeddings", 64)
    with pytest.raises(ValueError, match=sentence):
        TrainingFreeModel(model, "early_exit", calibration=calibration)
