"""Matrices in eight bits: how near products are, what they leave alone, and that text stays."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from medusa_heads import HeadsConfig, MedusaModel
from medusa_heads.heads import int8, new_heads
from medusa_heads.heads.int8 import Int8Linear, in_int8, int8_layers
from tests.conftest import TinyLlama

VOCAB, HIDDEN = 3000, 64
ALL_KINDS = [
    {"kind": "medusa"},
    {"kind": "medusa", "prefix_attention": True, "correction_rank": 8, "features": [0]},
    {"kind": "medusa", "vocab_matrix": "own"},
    {"kind": "medusa", "draft_vocab_size": 2500},
    {"kind": "hydra", "prefix_attention": True},
    {"kind": "block", "features": [0, 1]},
    {"kind": "eagle3", "features": [0, 1]},
]


@pytest.fixture
def every_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "SMALLEST", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_near(dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 200, bias=with_bias).to(dtype)
    near = Int8Linear(linear.weight, linear.bias)
    # Inputs of all sizes: each is rounded by its own scale.
    x_RD = torch.randn(3, 5, 96, dtype=dtype) * torch.logspace(-3, 3, 5, dtype=dtype)[:, None]
    with torch.no_grad():
        got, expected = near(x_RD), linear(x_RD)
        assert got.dtype == dtype and got.shape == expected.shape
        error_R = (got - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
        assert 0 < error_R.max() < 0.03
        part = near.rows(x_RD, 20, 70)
        torch.testing.assert_close(part, near.rows(x_RD)[..., 20:70], rtol=0, atol=0)
        # Of nothing comes nothing, or the bias.
        zero_O = near.rows(torch.zeros(1, 96, dtype=dtype))[0]
        assert torch.equal(zero_O, linear.bias.float() if with_bias else torch.zeros(200))


def test_a_layer_that_hands_its_input_on_keeps_its_other_weights() -> None:
    """Rounded by the scale of a diagonal of ones, they would be nothing or three times as large."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 128, bias=False)
    with torch.no_grad():
        linear.weight.normal_(std=0.005)
        linear.weight[:, :128] += torch.eye(128)
        x_RD = torch.randn(7, 256)
        near, besides = Int8Linear(linear.weight, None), linear(x_RD) - x_RD[:, :128]
        error_RD = near(x_RD) - linear(x_RD)
        assert float(error_RD.norm() / besides.norm()) < 0.05
        part = near.rows(x_RD, 20, 70)
        torch.testing.assert_close(part, near.rows(x_RD)[:, 20:70], rtol=0, atol=0)
        made = near(x_RD)
        linear.weight.mul_(2)
        assert torch.equal(near(x_RD), made)  # what is handed on follows no more than the rest
    gone = weakref.ref(linear.weight)
    del linear, near
    gc.collect()
    assert gone() is None  # nor does it keep the weights


def test_no_sum_of_two_products_fills_sixteen_bits() -> None:
    # Inputs become unsigned numbers of at most 255 where a processor multiplies no others.
    assert 2 * 255 * int8._MOST_WEIGHT < 1 << 15
    linear = nn.Linear(64, 10, bias=False)
    nn.init.constant_(linear.weight, 1.0)
    with torch.no_grad():
        full = Int8Linear(linear.weight, None)(torch.ones(1, 64))
    torch.testing.assert_close(full, torch.full((1, 10), 64.0))


def test_a_row_does_not_depend_on_others() -> None:
    near = Int8Linear(nn.Linear(64, 100).weight, None)
    x_RD = torch.randn(4, 64)
    with torch.no_grad():
        together = near(torch.cat([x_RD, 1e4 * x_RD]))[:4]
        assert torch.equal(near(x_RD), together)


@pytest.mark.usefixtures("every_matrix")
@pytest.mark.parametrize("settings", ALL_KINDS, ids=str)
def test_only_the_view_is_near(tiny_llama: TinyLlama, settings: Any) -> None:
    target = tiny_llama(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2)
    config = HeadsConfig(num_heads=2, **settings)
    chosen = None
    if config.draft_vocab_size is not None:
        chosen = torch.arange(config.draft_vocab_size)
    heads = new_heads(target, config, chosen).eval()
    before = dict(heads.state_dict())
    view = in_int8(heads)
    assert view is not heads and int8_layers(view) and not int8_layers(heads)
    assert list(view.parameters()) == list(heads.parameters())
    assert list(view.state_dict()) == list(before)
    width = HIDDEN * (1 + len(config.features or ()))
    hidden_BTX, tokens_BT = torch.randn(1, 6, width), torch.randint(VOCAB, (1, 6))
    with torch.no_grad():
        for parameter in heads.parameters():
            nn.init.normal_(parameter, std=0.1)
        near_view = in_int8(heads)
        tokens_BTK = tokens_BT[..., None].expand(-1, -1, 2)
        exact, near = (
            each(each.encode(hidden_BTX, tokens_BT), tokens_BTK) for each in (heads, near_view)
        )
    assert near.shape == exact.shape and not torch.equal(near, exact)
    assert (near - exact).norm() < 0.1 * exact.norm()
    assert not int8_layers(heads)


@pytest.mark.usefixtures("every_matrix")
def test_what_is_trained_on_is_rounded_anew(tiny_llama: TinyLlama) -> None:
    heads = new_heads(tiny_llama(), HeadsConfig(num_heads=1, vocab_matrix="own"))
    x_RD = torch.randn(2, heads._own(0).in_features)
    with torch.no_grad():
        first = in_int8(heads)(x_RD)
        assert torch.equal(in_int8(heads)(x_RD), first)
        heads._own(0).weight.mul_(2.0)
        torch.testing.assert_close(in_int8(heads)(x_RD), 2.0 * first)
        # As fused optimisers do, without a trace in the version.
        heads._own(0).weight.data.neg_()
        torch.testing.assert_close(in_int8(heads)(x_RD), -2.0 * first)


def test_matrices_are_rounded_once_and_let_go() -> None:
    weight = nn.Linear(8, 16).weight
    one, other = Int8Linear(weight, None), Int8Linear(weight, None)
    for near in (one, other):
        near.rows(torch.randn(1, 8))
    assert one._rounded is other._rounded
    known = len(int8._rounded)
    del one, other, near, weight
    gc.collect()
    assert len(int8._rounded) < known


def measured(_: object) -> float:
    raise AssertionError("nothing is measured here")


def test_small_matrices_stay(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "int8_gain", measured)
    heads = new_heads(tiny_llama(), HeadsConfig(num_heads=2, prefix_attention=True))
    assert in_int8(heads) is heads


@pytest.mark.usefixtures("every_matrix")
def test_what_lies_elsewhere_stays(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "int8_gain", measured)
    heads = new_heads(tiny_llama(), HeadsConfig(num_heads=2, vocab_matrix="own")).to("meta")
    assert in_int8(heads) is heads


@pytest.mark.usefixtures("every_matrix")
@pytest.mark.parametrize("there", [False, True])
def test_no_clock_is_read_where_steps_must_be_the_same(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(int8, "int8_gain", measured)
    monkeypatch.setattr(int8, "has_int8_products", lambda: there)
    target = tiny_llama()
    heads = new_heads(target, HeadsConfig(num_heads=2))
    medusa = MedusaModel(target, heads, tree="cartesian:2", deterministic=True)
    assert bool(int8_layers(medusa.drafting)) == there


@pytest.mark.usefixtures("every_matrix")
@pytest.mark.parametrize(("gain", "used"), [(0.3, False), (1.05, False), (1.5, True)])
def test_a_processor_that_is_no_faster_so_multiplies_as_ever(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, gain: float, used: bool
) -> None:
    # Measured is what it would be multiplied in else.
    monkeypatch.setattr(int8, "int8_gain", {torch.bfloat16: gain}.__getitem__)
    heads = new_heads(tiny_llama().to(torch.bfloat16), HeadsConfig(num_heads=2))
    assert bool(int8_layers(in_int8(heads.to(torch.bfloat16)))) == used


@pytest.mark.usefixtures("every_matrix")
@pytest.mark.parametrize("settings", ALL_KINDS, ids=str)
def test_text_stays_the_targets_own(tiny_llama: TinyLlama, settings: Any) -> None:
    target: Any = tiny_llama(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2)
    config = HeadsConfig(num_heads=3, **settings)
    chosen = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
    heads = new_heads(target, config, chosen)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.1)
    medusa = MedusaModel(target, heads, tree="cartesian:3,2")
    assert int8_layers(medusa.drafting) and not int8_layers(medusa.heads)
    ids = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20}
    got: Any = medusa.generate(ids, **options)
    assert torch.equal(got, target.generate(ids, **options))


@pytest.mark.parametrize("handed_on", [0.0, 1.0])
def test_all_that_is_held_is_announced(handed_on: float) -> None:
    """The weights that hand inputs on among it, which stay in 32 bits; before anything is made."""
    weight_OD = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) / 100
    layer = Int8Linear(weight_OD + handed_on * torch.eye(32), None)
    announced = layer.held
    layer(torch.ones(1, 32))
    assert layer._rounded is not None
    assert (layer._rounded.handed_on_O is not None) == bool(handed_on)
    assert announced == sum(part.nbytes for part in layer._rounded if part is not None)
