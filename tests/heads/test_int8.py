"""Matrices in eight bits: how near products are, and what they leave alone."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from medusa_heads.heads import int8
from medusa_heads.heads.int8 import Int8Linear


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


@pytest.mark.parametrize("first", [0, 128, 256])
def test_a_layer_that_hands_an_input_on_keeps_its_other_weights(first: int) -> None:
    """Rounded by the scale of a diagonal of ones, they would be nothing or three times as large.
    Of several inputs side by side it is the last one that layers of features hand on."""
    torch.manual_seed(0)
    linear = nn.Linear(384, 128, bias=False)
    own = slice(first, first + 128)
    with torch.no_grad():
        linear.weight.normal_(std=0.005)
        linear.weight[:, own] += torch.eye(128)
        x_RD = torch.randn(7, 384)
        near, besides = Int8Linear(linear.weight, None), linear(x_RD) - x_RD[:, own]
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


@pytest.mark.parametrize("handed_on", [0.0, 1.0])
def test_all_that_is_held_is_announced(handed_on: float) -> None:
    """The weights that hand inputs on among it, which stay in 32 bits; before anything is made."""
    weight_OD = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) / 100
    layer = Int8Linear(weight_OD + handed_on * torch.eye(32), None)
    announced = layer.held
    layer(torch.ones(1, 32))
    assert layer._rounded is not None
    assert (layer._rounded.handed_on_O is not None) == bool(handed_on)
    assert announced == sum(of.nbytes for of in layer._rounded if isinstance(of, torch.Tensor))
