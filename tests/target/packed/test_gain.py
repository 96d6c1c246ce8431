"""What copies gain in a whole forward."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from medusa_heads.cache_names import cache_argument
from medusa_heads.machine.kernels import has_packed_products, turned_product
from medusa_heads.target.attention import TreeMask, tree_attention
from medusa_heads.target.packed import gain as module
from medusa_heads.target.packed import layer as layer_module
from medusa_heads.target.packed import matrices
from medusa_heads.target.packed.gain import forward_gain
from medusa_heads.target.packed.layer import Copies
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.packing import MATRICES, calls

pytestmark = pytest.mark.skipif(
    not has_packed_products(torch.float32), reason="this build of torch packs no matrix"
)


@pytest.mark.parametrize(("gain", "serves"), [(1.04, False), (1.06, True), (None, True)])
def test_one_row_is_multiplied_by_copies_where_a_whole_forward_gains(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, gain: float | None, serves: bool
) -> None:
    """Products alone promise more than they keep between all else that a forward does."""
    asked: list[int] = []
    monkeypatch.setattr(matrices, "SMALLEST", 1)
    monkeypatch.setattr(matrices, "packed_gain", lambda *_: 1.3)
    monkeypatch.setattr(matrices, "turned_gain", lambda *_: 2.0)

    def measured(_: object, layers: Mapping[nn.Linear, Copies]) -> float | None:
        asked.append(len(layers))
        return gain

    monkeypatch.setattr(matrices, "forward_gain", measured)
    target = TargetModel(tiny_llama())
    ones = 2 * 3 + 3  # wide ones by columns, and those of the second kind that is measured packed
    for rows, made_by in ((1, ones * serves), (8, MATRICES)):
        with torch.no_grad(), calls(target, rows) as made:
            target.model(torch.full((1, rows), 7))
        assert len(made) == made_by
    assert asked == [ones]  # once


def test_what_a_forward_gains_is_measured_once_and_leaves_no_trace(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    up_proj = model.model.layers[0].mlp.up_proj
    layers = {layer: Copies(frozenset({8}), turned=True) for layer in (model.lm_head, up_proj)}
    monkeypatch.setattr(layer_module, "pack", None)  # one token has no use for such a copy
    counted: list[int] = []
    model.register_forward_hook(lambda *_: counted.append(1))
    lengths: list[int] = []  # of the text before each forward
    autocast: set[bool] = set()
    forward, argument = model.forward, cache_argument(model.forward)

    @wraps(forward)
    def read(**given: Any) -> Any:
        lengths.append(given[argument].get_seq_length())
        autocast.add(torch.is_autocast_enabled("cpu"))
        return forward(**given)

    monkeypatch.setattr(model, "forward", read)
    mask = TreeMask(torch.ones(1, 1, 5).bool(), torch.tensor([[4]]), 4)
    contention = SimpleNamespace(seen=lambda: False)
    monkeypatch.setattr(module, "Contention", lambda: contention)
    monkeypatch.setattr(module, "_LONG", float("inf"))  # however busy this machine is
    with torch.no_grad(), tree_attention(mask), torch.autocast("cpu", torch.bfloat16):
        gain = forward_gain(model, layers)
    assert gain is not None and gain > 0.0 and not counted
    assert lengths == list(range(len(lengths))) and autocast == {False}
    assert not any("forward" in vars(module) for module in model.modules() if module is not model)
    monkeypatch.setattr(model, "forward", None)  # it is kept
    assert forward_gain(model, layers) == gain


@pytest.mark.usefixtures("cache")
def test_copies_of_another_kind_are_timed_anew(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the columns of a matrix gain says nothing of the packed one."""
    model = tiny_llama()
    gains = iter([2.0, 0.5])
    monkeypatch.setattr(module, "Contention", lambda: SimpleNamespace(seen=lambda: False))
    monkeypatch.setattr(module, "_measured_gain", lambda *_: next(gains))
    by_columns, packed = Copies(turned=True), Copies(frozenset({1}))
    assert forward_gain(model, {model.lm_head: by_columns}) == 2.0
    assert forward_gain(model, {model.lm_head: packed}) == 0.5
    assert forward_gain(model, {model.lm_head: by_columns}) == 2.0  # as it was kept


def test_slow_copies_lose(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what other programs may have disturbed is not kept."""

    def slow(*given: Any) -> Any:
        time.sleep(0.02)
        return turned_product(*given)

    monkeypatch.setattr(module, "_LONG", float("inf"))
    monkeypatch.setattr(module, "Contention", lambda: SimpleNamespace(seen=lambda: True))
    monkeypatch.setattr(layer_module, "turned_product", slow)
    model = tiny_llama(num_layers=1)
    of_one = {model.lm_head: Copies(turned=True)}
    gain = forward_gain(model, of_one)
    assert gain is not None and gain < 1.0
    monkeypatch.setattr(layer_module, "turned_product", turned_product)
    again = forward_gain(model, of_one)
    assert again is not None and again > gain


def test_forwards_that_take_long_or_fail(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept of one that fails, as for want of memory: others of its like may not."""
    model, failing = tiny_llama(), tiny_llama(num_layers=1)
    monkeypatch.setattr(module, "Contention", lambda: SimpleNamespace(seen=lambda: False))
    monkeypatch.setattr(module, "_LONG", float("inf"))
    of_one = {failing.lm_head: Copies(turned=True)}
    with monkeypatch.context() as patch:
        patch.setattr(failing, "forward", lambda **_: 1 / 0)
        assert forward_gain(failing, of_one) == 0.0
    again = forward_gain(failing, of_one)
    assert again is not None and again > 0.0
    monkeypatch.setattr(failing, "forward", None)  # is not asked
    with monkeypatch.context() as patch:
        patch.setattr(module, "_LARGE", failing.lm_head.weight.nbytes - 1)
        assert forward_gain(failing, of_one) is None
    of_one = {model.lm_head: Copies(turned=True)}
    with monkeypatch.context() as patch:
        patch.setattr(module, "_LONG", 0.0)
        assert forward_gain(model, of_one) is None
    assert forward_gain(model, of_one) is None  # as it was kept
