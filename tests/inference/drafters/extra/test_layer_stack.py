"""Targets whose layers cannot be left out are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
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
