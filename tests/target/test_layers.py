"""Where a model's numbered layers stand."""

from __future__ import annotations

from torch import nn
from transformers import LlamaForCausalLM

from medusa_heads.target.layers import layer_lists
from tests.conftest import TinyLlama


def test_the_list_is_found_by_its_length_and_its_own_lists_are_not(tiny_llama: TinyLlama) -> None:
    model: LlamaForCausalLM = tiny_llama(num_hidden_layers=3)
    assert list(layer_lists(model)) == ["model.layers"]
    model.model.layers[0].experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    assert list(layer_lists(model)) == ["model.layers"]
