"""Targets whose layers cannot be left out are refused by name; a thread leaves out for itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.drafters.extra.layer_stack import LayerStack
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama


def test_what_cannot_be_left_out_is_refused_by_name(tiny_llama: TinyLlama) -> None:
    with pytest.raises(UnsupportedArchitecture, match="this llama has one layer"):
        LayerStack(TargetModel(tiny_llama(num_layers=1)))
    lost = tiny_llama(num_layers=3)
    lost.config.num_hidden_layers = 2
    with pytest.raises(UnsupportedArchitecture, match="llama has no lists of 2 modules"):
        LayerStack(TargetModel(lost))
    twice = tiny_llama(num_layers=2)
    twice.model.more = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(UnsupportedArchitecture, match="has 2 lists of 2 modules"):
        LayerStack(TargetModel(twice))
    between = tiny_llama(num_layers=3)
    between.model.layers[1].register_forward_pre_hook(lambda _layer, args: (2 * args[0], *args[1:]))
    with pytest.raises(UnsupportedArchitecture, match="do more than hand hidden states on"):
        LayerStack(TargetModel(between))
    particular = tiny_llama(num_layers=3)

    def demand(layer: nn.Module, *_: Any) -> None:
        if "forward" in layer.__dict__:
            raise RuntimeError("nothing came")

    particular.model.layers[1].register_forward_hook(demand)
    with pytest.raises(UnsupportedArchitecture, match=r"fails without .* nothing came"):
        LayerStack(TargetModel(particular))
    assert "forward" not in particular.model.layers[1].__dict__


def test_a_thread_leaves_layers_out_for_itself_alone(tiny_llama: TinyLlama) -> None:
    model = tiny_llama(num_layers=3)
    ids_1T = torch.arange(3, 12)[None]
    stacks = [LayerStack(TargetModel(model)) for _ in range(2)]  # two decoders of one model

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(ids_1T).logits

    own = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **kwargs: own(*args, **kwargs)  # as accelerate's
    put = model.model.layers[1].__dict__["forward"]
    whole = logits()
    with stacks[0].without([1]):
        thinned = logits()
    with stacks[1].without([1, 2]):
        first = logits()
    assert not torch.equal(thinned, whole) and not torch.equal(first, thinned)
    with ThreadPoolExecutor(1) as pool:
        other = stacks[1].without([1, 2])
        with stacks[0].without([1]):
            assert torch.equal(pool.submit(logits).result(), whole)
            pool.submit(other.__enter__).result()
            assert torch.equal(pool.submit(logits).result(), first)
            assert torch.equal(logits(), thinned)
        # The thread that began last is still within.
        assert torch.equal(logits(), whole)
        assert torch.equal(pool.submit(logits).result(), first)
        pool.submit(other.__exit__, None, None, None).result()
    assert torch.equal(logits(), whole)
    assert model.model.layers[1].__dict__["forward"] is put
    assert "forward" not in model.model.layers[2].__dict__
