"""Heads as drafters read them: which layers they get, how near these are, and that text stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from medusa_heads import HeadsConfig, MedusaModel
from medusa_heads.heads import drafting, new_heads
from medusa_heads.heads.drafting import for_drafting, near_layers
from medusa_heads.heads.int8 import Int8Linear
from medusa_heads.heads.near import NearLinear, PackedLinear
from medusa_heads.machine.kernels import has_packed_products
from tests.conftest import TinyLlama

VOCAB, HIDDEN = 3000, 64
ALL_KINDS = [
    {"kind": "medusa"},
    {"kind": "medusa", "prefix_attention": True, "correction_rank": 8, "features": [0]},
    {"kind": "medusa", "vocab_matrix": "own"},
    {"kind": "medusa", "draft_vocab_size": 2500, "linear_shortcut": True},
    {"kind": "hydra", "prefix_attention": True},
    {"kind": "hydra", "induction": True},
    {"kind": "block", "features": [0, 1]},
    {"kind": "eagle3", "features": [0, 1]},
]
PLAIN = ALL_KINDS[2:5]  # what the others read, and other matrices
PACKS = pytest.mark.skipif(
    not has_packed_products(torch.float32), reason="this build of torch packs no matrices"
)
LAYERS = [Int8Linear, pytest.param(PackedLinear, marks=PACKS)]


@pytest.fixture
def every_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "SMALLEST", 0)


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[NearLinear]:
    """What pays on this machine."""
    chosen: type[NearLinear] = request.param
    monkeypatch.setattr(drafting, "int8_gain", lambda _: 2.0 * (chosen is Int8Linear))
    monkeypatch.setattr(drafting, "packed_gain", lambda *_: 2.0)
    return chosen


def replaced(layer: type[NearLinear], settings: Any) -> bool:
    """Whether heads have such layers: of one row at a time, nothing is gained by packing."""
    return layer is Int8Linear or settings.get("vocab_matrix") != "own"


@pytest.mark.usefixtures("every_matrix")
@pytest.mark.parametrize("settings", ALL_KINDS, ids=str)
def test_only_the_view_is_near(
    tiny_llama: TinyLlama, layer: type[NearLinear], settings: Any
) -> None:
    target = tiny_llama(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2)
    config = HeadsConfig(num_heads=2, **settings)
    chosen = None
    if config.draft_vocab_size is not None:
        chosen = torch.arange(config.draft_vocab_size)
    heads = new_heads(target, config, chosen).eval()
    before = dict(heads.state_dict())
    view = for_drafting(heads)
    if not replaced(layer, settings):
        assert view is heads and not near_layers(heads)
        return
    assert view is not heads and {type(each) for each in near_layers(view)} == {layer}
    assert not near_layers(heads)
    assert list(view.parameters()) == list(heads.parameters())
    assert list(view.state_dict()) == list(before)
    width = HIDDEN * (1 + len(config.features or ()))
    hidden_BTX, tokens_BT = torch.randn(1, 6, width), torch.randint(VOCAB, (1, 6))
    with torch.no_grad():
        for parameter in heads.parameters():
            nn.init.normal_(parameter, std=0.1)
        near_view = for_drafting(heads)
        tokens_BTK = tokens_BT[..., None].expand(-1, -1, 2)
        exact, near = (
            each(each.encode(hidden_BTX, tokens_BT), tokens_BTK) for each in (heads, near_view)
        )
    assert near.shape == exact.shape
    assert layer is PackedLinear or not torch.equal(near, exact)
    assert (near - exact).norm() < (0.1 if layer is Int8Linear else 1e-5) * exact.norm()
    assert not near_layers(heads)


def measured(*_: object) -> float:
    raise AssertionError("nothing is measured here")


def test_small_matrices_stay(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "int8_gain", measured)
    heads = new_heads(tiny_llama(), HeadsConfig(num_heads=2, prefix_attention=True))
    assert for_drafting(heads) is heads


@pytest.mark.usefixtures("every_matrix")
def test_what_lies_elsewhere_stays(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "int8_gain", measured)
    heads = new_heads(tiny_llama(), HeadsConfig(num_heads=2, vocab_matrix="own")).to("meta")
    assert for_drafting(heads) is heads


@pytest.mark.usefixtures("every_matrix")
@pytest.mark.parametrize(("there", "packs"), [(False, False), (False, True), (True, True)])
def test_no_clock_is_read_where_steps_must_be_the_same(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, there: bool, packs: bool
) -> None:
    monkeypatch.setattr(drafting, "int8_gain", measured)
    monkeypatch.setattr(drafting, "packed_gain", measured)
    monkeypatch.setattr(drafting, "has_int8_products", lambda: there)
    monkeypatch.setattr(drafting, "has_packed_products", lambda _: packs)
    target = tiny_llama()
    heads = new_heads(target, HeadsConfig(num_heads=2))
    medusa = MedusaModel(target, heads, tree="cartesian:2", deterministic=True)
    found = {type(layer) for layer in near_layers(medusa.drafting)}
    assert found == ({Int8Linear} if there else {PackedLinear} if packs else set())


@pytest.mark.usefixtures("every_matrix")
@pytest.mark.parametrize(("gain", "used"), [(0.3, False), (1.05, False), (1.5, True)])
def test_a_processor_that_is_no_faster_so_multiplies_as_ever(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, gain: float, used: bool
) -> None:
    # Measured is what it would be multiplied in else.
    monkeypatch.setattr(drafting, "int8_gain", {torch.bfloat16: gain}.__getitem__)
    asked: list[Any] = []

    def packed_gain(*of: Any) -> float:
        asked.append(of)
        return gain

    monkeypatch.setattr(drafting, "packed_gain", packed_gain)
    monkeypatch.setattr(drafting, "has_packed_products", lambda _: True)
    heads = new_heads(tiny_llama().to(torch.bfloat16), HeadsConfig(num_heads=2))
    view = for_drafting(heads.to(torch.bfloat16))
    assert {type(layer) for layer in near_layers(view)} == ({Int8Linear} if used else set())
    assert asked == ([] if used else [(torch.bfloat16, 1024, 1024, "draft")])


@pytest.mark.usefixtures("every_matrix")
@pytest.mark.parametrize(
    ("layer", "settings"),
    [
        pytest.param(layer, settings, marks=[*skips, *([pytest.mark.slow] * is_slow)])
        for i, (layer, skips) in enumerate([(Int8Linear, []), (PackedLinear, [PACKS])])
        for j, settings in enumerate(ALL_KINDS)
        for is_slow in [(i + j) % 2 == 1 or settings in PLAIN]
    ],
    indirect=["layer"],
)
def test_text_stays_the_targets_own(
    tiny_llama: TinyLlama, layer: type[NearLinear], settings: Any
) -> None:
    target: Any = tiny_llama(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2)
    config = HeadsConfig(num_heads=3, **settings)
    chosen = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
    heads = new_heads(target, config, chosen)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.1)
    medusa = MedusaModel(target, heads, tree="cartesian:3,2")
    assert bool(near_layers(medusa.drafting)) == replaced(layer, settings)
    assert not near_layers(medusa.heads)
    ids = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20}
    got: Any = medusa.generate(ids, **options)
    assert torch.equal(got, target.generate(ids, **options))
