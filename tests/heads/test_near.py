"""Packed layers: for which rows they are packed, how near products are, and what is kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from medusa_heads.heads import near
from medusa_heads.heads.int8 import Int8Linear
from medusa_heads.heads.near import NearLinear, PackedLinear, made_of
from medusa_heads.machine.kernels import has_packed_products

pytestmark = pytest.mark.skipif(
    not has_packed_products(torch.float32), reason="this build of torch packs no matrices"
)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of all products with packed matrices."""
    rows: list[int] = []

    def product(x_ND: Tensor, matrix: Tensor, bias_O: Tensor | None = None) -> Tensor:
        rows.append(len(x_ND))
        return true_product(x_ND, matrix, bias_O)

    true_product = near.packed_product
    monkeypatch.setattr(near, "packed_product", product)
    return rows


@pytest.mark.parametrize("with_bias", [False, True])
@torch.no_grad()
def test_few_rows_are_multiplied_by_a_packed_matrix(with_bias: bool, packed: list[int]) -> None:
    torch.manual_seed(0)
    exact = nn.Linear(96, 200, bias=with_bias)
    layer = PackedLinear(exact.weight, exact.bias)
    assert layer.held  # packed, and compared once
    for shape, few in [((1,), 0), ((2,), 2), ((3, 5), 15), ((32,), 32), ((33,), 0), ((0,), 0)]:
        x_RD = torch.randn(*shape, 96)
        packed.clear()
        got = layer(x_RD)
        torch.testing.assert_close(got, exact(x_RD), atol=1e-5, rtol=1e-4)
        assert packed == [few] * bool(few)
    x_RD = torch.randn(2, 96)
    packed.clear()
    bias_O = None if exact.bias is None else exact.bias[20:70]
    assert torch.equal(layer.rows(x_RD, 20, 70), linear(x_RD, exact.weight[20:70], bias_O))
    assert not packed


@pytest.mark.parametrize("kind", [PackedLinear, Int8Linear])
@torch.no_grad()
def test_weights_that_were_moved_multiply_as_usual(kind: type[NearLinear]) -> None:
    """To a GPU, say, once they have drafted."""
    exact = nn.Linear(32, 64)
    layer, x_ND = kind(exact.weight, exact.bias), torch.randn(4, 32)
    assert layer(x_ND).shape == (4, 64) and layer.held
    layer.weight, layer.bias = (nn.Parameter(each.to("meta")) for each in exact.parameters())
    given = layer(x_ND.to("meta"))
    assert given.is_meta and given.shape == (4, 64) and not layer.held


@pytest.mark.parametrize("kind", [PackedLinear, Int8Linear])
@torch.no_grad()
def test_any_device_may_be_the_default(kind: type[NearLinear]) -> None:
    """Also a GPU, beside heads on the CPU."""
    layer, x_ND = kind(nn.Parameter(torch.randn(64, 32)), None), torch.randn(4, 32)
    with torch.device("meta"):
        given = layer(x_ND)
    assert torch.equal(given, layer(x_ND))


@torch.no_grad()
def test_inputs_come_back_in_their_dtype() -> None:
    layer = PackedLinear(nn.Linear(32, 48).weight, None)
    x_RD = torch.randn(4, 32, dtype=torch.float64)
    assert layer(x_RD).dtype == torch.float64 and layer.rows(x_RD).dtype == torch.float32


@torch.no_grad()
def test_a_wrong_kernel_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = nn.Linear(32, 48, bias=False)
    wrong = near.packed_product(torch.ones(2, 32), near.pack(exact.weight)) + 1.0
    monkeypatch.setattr(near, "packed_product", lambda *_: wrong)
    layer, x_RD = PackedLinear(exact.weight, None), torch.randn(2, 32)
    assert torch.equal(layer(x_RD), exact(x_RD)) and layer.held == 0


def test_what_is_held_is_announced_before_it_is_made() -> None:
    exact = nn.Linear(64, 128, bias=False)
    assert PackedLinear(exact.weight, None).held >= exact.weight.nbytes


def test_a_graph_multiplies_by_the_matrix_itself(packed: list[int]) -> None:
    exact = nn.Linear(32, 48)
    layer, x_RD = PackedLinear(exact.weight, exact.bias), torch.randn(4, 32)
    with torch.no_grad():
        graph = torch.compile(layer.rows, backend="eager", fullgraph=True)
        torch.testing.assert_close(graph(x_RD), exact(x_RD))
    assert not packed


def test_what_is_made_of_weights_is_kept_until_they_change_and_let_go_with_them() -> None:
    weight = nn.Linear(8, 16).weight
    made: list[Tensor] = []

    def make(weight_OD: Tensor) -> int:
        made.append(weight_OD.sum())
        return len(made)

    assert made_of(weight, make) == made_of(weight, make) == 1
    with torch.no_grad():
        weight.mul_(2.0)
        assert made_of(weight, make) == 2
        weight.data.neg_()  # as fused optimisers do, without a trace in the version
        assert made_of(weight, make) == 3
    known = len(near._made)
    del weight
    gc.collect()
    assert len(near._made) == known - 1
