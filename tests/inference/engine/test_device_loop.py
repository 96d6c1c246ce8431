"""Steps on the device alone: generate()'s tokens, whatever was drafted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    MistralConfig,
    PreTrainedConfig,
)

from medusa_heads import HeadsConfig, MedusaModel, new_heads
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.inference.acceptance.at_once import DeepestPath, deepest_path
from medusa_heads.inference.engine import device_loop, device_state
from medusa_heads.inference.engine.noise import NoiseOnDevice
from medusa_heads.inference.engine.reading import Reading
from medusa_heads.inference.engine.state import DecodingState, padded_mask
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.attention import TreeMask
from medusa_heads.trees.tree import TokenTree
from tests.conftest import DEVICE, TinyLlama
from tests.inference.clock import Clock
from tests.inference.on_device import (
    LATE,
    NEW,
    SAMPLING,
    Placed,
    PlantedOnDevice,
    drawn_planted,
    planted,
    text,
    with_heads,
)
from tests.inference.padded import padded
from tests.inference.reference import reference
from tests.pairs import alternately, with_slow

pytestmark = pytest.mark.usefixtures("small_caches")

BATCHES = ([0], [0, 3, 7], [2, 0, 0, 5, 1, 8, 0, 3])  # padding of each row
ENDLESS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = ENDLESS | {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama().to(DEVICE)
    made.generation_config.pad_token_id = 0
    return made


@pytest.fixture(scope="module")
def medusa(model: Any) -> MedusaModel:
    return with_heads(model)


@pytest.mark.parametrize(
    ("truth", "padding"), alternately([[4], [0], [2, 0, 4, 1, 3]], BATCHES), ids=str
)
def test_planted_drafts(
    model: Any, medusa: MedusaModel, padding: list[int], truth: list[int]
) -> None:
    inputs = padded(padding, 12)
    medusa.drafter = planted(model, inputs, truth)
    for new in (NEW - 1, 2, NEW) if len(truth) > 1 else (NEW,):  # the last token within a path
        expected = reference(model, do_sample=False, max_new_tokens=new, **inputs)
        assert torch.equal(text(medusa, inputs, max_new_tokens=new), expected)
        stats = medusa.last_stats
        assert stats.seconds["step"] and stats.tokens == new * len(padding)
        assert sum(n * (1 + k) for k, n in stats.accepted.items()) == stats.tokens
    whole = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)[:, 12:]
    for place in (5, 14):
        ends: dict[str, Any] = {"eos_token_id": [int(whole[0, place]), int(whole[-1, 11])]}
        expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs, **ends)
        assert torch.equal(text(medusa, inputs, **ends), expected)
    if truth == [0]:
        assert set(medusa.last_stats.accepted) == {0}
    elif truth == [4]:
        text(medusa, inputs)
        assert medusa.last_stats.tokens_per_step > 3


def test_negative_controls(
    model: Any, medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = padded([0, 3, 7], 12)
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
    medusa.drafter = planted(model, inputs, [2, 0, 4, 1, 3])
    assert torch.equal(text(medusa, inputs), expected)

    def causal(tree: TokenTree, *given: Any) -> TreeMask:
        all_NN = torch.ones_like(tree.ancestors_BNN).tril()
        return padded_mask(replace(tree, ancestors_BNN=all_NN), *given)

    with monkeypatch.context() as wrong:
        wrong.setattr(device_state, "padded_mask", causal)
        assert not torch.equal(text(medusa, inputs), expected)

    def without_ancestors(tree: TokenTree, drawn_BN: Tensor, levels: int) -> DeepestPath:
        own_NN = torch.eye(tree.num_nodes, dtype=torch.bool, device=DEVICE)
        lonely = replace(tree, ancestors_BNN=own_NN.expand_as(tree.ancestors_BNN))
        return deepest_path(lonely, drawn_BN, levels)

    monkeypatch.setattr(device_loop, "deepest_path", without_ancestors)
    assert not torch.equal(text(medusa, inputs), expected)


@pytest.mark.parametrize("padding", BATCHES, ids=["1 row", "3 rows", "8 rows"])
def test_planted_drafts_of_drawn_text(
    model: Any, medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch, padding: list[int]
) -> None:
    inputs = padded(padding, 12)
    expected = drawn_planted(medusa, inputs, [2, 0, 4, 1, 3])
    assert torch.equal(text(medusa, inputs, **SAMPLING), expected)
    assert max(medusa.last_stats.accepted) == 4 and medusa.last_stats.seconds["step"]
    of_all = NoiseOnDevice.draw_all

    def of_the_root(noise: NoiseOnDevice, scores_BNV: Tensor, depth_BN: Tensor) -> Tensor:
        return of_all(noise, scores_BNV, torch.zeros_like(depth_BN))

    monkeypatch.setattr(NoiseOnDevice, "draw_all", of_the_root)
    assert not torch.equal(text(medusa, inputs, **SAMPLING), expected)


NORMED = replace(DecoderShape.of_width(64), norm_output=True)
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "hydra": {"kind": "hydra"},
    "correction": {"correction_rank": 8},
    "features": {"features": (0,)},
    "own matrices": {"vocab_matrix": "own"},
    "prefix": {"prefix_attention": True, "correction_rank": 8},
    "induction": {"kind": "hydra", "induction": True},
    "block": {"kind": "block"},
    "eagle3": {"kind": "eagle3"},
    "eagle3, features": {"kind": "eagle3", "features": (0,)},
    "eagle3, norm_output": {"kind": "eagle3", "decoder": NORMED},
}


TREES = ("chain", "7", "none", "dynamic:7")
# Others have all that they do.
ALIKE = ("correction", "features", "own matrices", "eagle3", "eagle3, features")
NEAR = (*ALIKE, "block")


@pytest.mark.parametrize("other", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", with_slow([k for k in KINDS if k not in NEAR], NEAR))
def test_heads_of_all_kinds(model: Any, kind: str, other: bool) -> None:
    """Greedy text is that of generate(), and drawn text that of steps which ask the host."""
    medusa, inputs = with_heads(model, **KINDS[kind]), padded([0, 4, 0], 12)
    asking = MedusaModel(model, medusa.heads, tree="none")
    drawn: dict[str, Any] = {"max_new_tokens": NEW, **SAMPLING}
    torch.manual_seed(3)
    expected_drawn: Any = asking.generate(**inputs, **drawn)  # type: ignore[arg-type]
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
    number, usual = list(KINDS).index(kind), kind == "medusa"
    for place, tree in enumerate(TREES if usual else TREES[number % 2 :: 2]):
        medusa.use_tree(tree)
        is_drawn = (place + number // 2) % 2 == int(other)  # one text of two, which changes
        if usual or not is_drawn:
            assert torch.equal(text(medusa, inputs, max_new_tokens=NEW), expected), tree
            assert "step" in medusa.last_stats.seconds
        if usual or is_drawn:
            assert torch.equal(text(medusa, inputs, **drawn), expected_drawn), tree
            assert "step" in medusa.last_stats.seconds
    assert not torch.equal(text(medusa, inputs, seed=4, **drawn), expected_drawn)


def test_recycled_trees(model: Any, medusa: MedusaModel) -> None:
    """Learnt from step by step, as on the other road."""
    asking = MedusaModel(model, medusa.heads, tree="none")
    for padding in ([0], [0, 4, 0]):
        inputs: Any = padded(padding, 12)
        greedy = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
        torch.manual_seed(3)
        drawn: Any = asking.generate(**inputs, max_new_tokens=NEW, **SAMPLING)
        accepted = []
        for whole_steps in (True, False):
            recycling = TrainingFreeModel(
                model, "recycling:9", compile="steps", compile_backend="eager"
            )
            recycling.target.whole_steps = whole_steps  # type: ignore[attr-defined]
            for options, right in (({}, greedy), (SAMPLING, drawn)):
                assert torch.equal(text(recycling, inputs, **options), right)
                assert ("step" in recycling.last_stats.seconds) == whole_steps
                accepted.append(recycling.last_stats.accepted)
        if padding == [0]:
            assert accepted[:2] == accepted[2:]
            assert max(accepted[0]) > 0 and max(accepted[1]) > 0


@pytest.mark.skipif(DEVICE != "cpu", reason="the last of several is last on a CPU alone")
@pytest.mark.parametrize(
    ("tree", "options"), alternately(("auto", "dynamic:9", "7"), ({}, SAMPLING), slow=("7",))
)
def test_nothing_is_written_twice(medusa: MedusaModel, tree: str, options: Any) -> None:
    medusa.use_tree(tree)
    with Placed() as placed:
        text(medusa, padded([0, 3, 7], 12), max_new_tokens=NEW, **options)
    assert "step" in medusa.last_stats.seconds
    assert placed.count and not placed.twice


WINDOWS: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "gpt2": GPT2Config(vocab_size=199, n_embd=64, n_layer=2, n_head=4, n_positions=36, **ENDLESS),
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_and_positions_that_end(kind: str) -> None:
    """Trees straddle the edge of a window; and the last position, where nothing lies behind."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(WINDOWS[kind]).float().eval().to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.15)
    model.generation_config.pad_token_id = 0
    medusa, inputs = with_heads(model), padded([0, 3, 7], 12)
    expected = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
    medusa.drafter = PlantedOnDevice(expected[:, 12:].tolist(), [2, 0, 4, 1, 3])
    assert torch.equal(text(medusa, inputs), expected)
    assert max(medusa.last_stats.accepted) == 4


@pytest.mark.parametrize(("kind", "options"), alternately(KINDS, ({}, SAMPLING), slow=ALIKE))
def test_drafts_are_those_of_the_other_road(model: Any, kind: str, options: dict[str, Any]) -> None:
    """Step by step, of heads in which all weights count, also those of a prefix layer."""
    heads = new_heads(model, HeadsConfig(num_heads=3, **KINDS[kind]))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in heads.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(DEVICE), alpha=0.05)
    medusa = MedusaModel(model, heads, tree="7", compile="steps", compile_backend="eager")
    drafted: list[list[Tensor]] = []
    propose = medusa.drafter.propose

    def recorded(state: DecodingState) -> TokenTree:
        tree = propose(state)
        drafted[-1].append(tree.tokens_BN.clone())
        return tree

    medusa.drafter.propose = recorded  # type: ignore[method-assign]
    for whole_steps in (True, False):
        medusa.target.whole_steps = whole_steps  # type: ignore[attr-defined]
        drafted.append([])
        text(medusa, padded([0], 12), **options)
        assert ("step" in medusa.last_stats.seconds) == whole_steps
    (first, *steps), asked = drafted  # once to make what is kept
    assert torch.equal(first, steps[0])
    assert len(steps) == len(asked) + LATE
    assert torch.equal(torch.cat(steps[: len(asked)]), torch.cat(asked))


def test_trained_heads_are_as_often_right() -> None:
    """In long paths too, whose positions a prefix layer reads at once."""
    options: dict[str, Any] = {"tree": "dynamic:9", "dtype": torch.float32, "device": DEVICE}
    model = MedusaModel.from_pretrained(
        "assets/demo-heads", compile="steps", compile_backend="eager", **options
    )
    inputs, accepted = padded([0, 2, 5], 12, range(5, 4000)), []
    for whole_steps in (True, False):
        model.target.whole_steps = whole_steps  # type: ignore[attr-defined]
        made = text(model, inputs, eos_token_id=None, pad_token_id=0)
        accepted.append((model.last_stats.accepted, model.last_stats.steps, made.tolist()))
    assert accepted[0] == accepted[1]
    assert max(accepted[0][0]) >= 3


def test_a_steps_seconds_are_of_those_that_only_do_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made in one is no reason to make more: it is seen when the next has been begun."""
    clock = Clock(monkeypatch)
    reading = Reading(torch.zeros(8), levels=1)
    for usual, seconds in ((False, 9.0), (True, 1.0), (True, 2.0), (False, 9.0), (True, 9.0)):
        reading.goes_on(None)
        reading.begins(usual)
        reading.sizes.append(None)
        clock.work(seconds)
    reading.goes_on(None)
    assert reading.usual_seconds == pytest.approx(2.0, abs=1e-3)
