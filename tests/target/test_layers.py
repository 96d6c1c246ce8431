"""Where a model's numbered layers stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaForCausalLM,
    OPTConfig,
)

from medusa_heads import HeadsConfig, MedusaModel, new_heads
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target.layers import behind_layers, decoder_layers, layer_lists
from medusa_heads.target.target import TargetModel
from scripts.prove.tiny_models import builder
from tests.conftest import TinyLlama

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 20,
}


def test_the_list_is_found_by_its_length_and_its_own_lists_are_not(tiny_llama: TinyLlama) -> None:
    model: LlamaForCausalLM = tiny_llama(num_hidden_layers=3)
    assert list(layer_lists(model)) == ["model.layers"]
    model.model.layers[0].experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    assert list(layer_lists(model)) == ["model.layers"]


def test_an_lm_head_called_decoder_holds_no_layers() -> None:
    model: Any = builder("modernbert-decoder")((0.15, 0.15)).float().eval()
    assert isinstance(model.get_decoder(), nn.Linear)
    assert decoder_layers(model, "wait") == list(model.model.layers)
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    medusa = MedusaModel(model, new_heads(model, HeadsConfig(num_heads=2, features=[0])), tree=4)
    ids_1T = torch.arange(5, 25)[None]
    options: Any = {"attention_mask": torch.ones_like(ids_1T), "max_new_tokens": 12}
    got: Any = medusa.generate(ids_1T, do_sample=False, **options)
    assert torch.equal(got, model.generate(ids_1T, do_sample=False, **options))


@pytest.mark.parametrize(
    ("config", "classes"),
    [
        (GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20), ["LayerNorm"]),
        (OPTConfig(**SIZES, ffn_dim=16, word_embed_proj_dim=8), ["LayerNorm", "Linear"]),
    ],
)
def test_behind_the_layers_stands_what_makes_the_lm_heads_input(
    config: Any, classes: list[str]
) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    found = behind_layers(model, "-")
    assert [type(part).__name__ for part in found] == classes
    target = TargetModel(model)
    ids_BT = torch.arange(12).view(2, 6)
    last: list[Any] = []
    layers = next(iter(layer_lists(model).values()))
    with torch.no_grad():
        layers[-1].register_forward_hook(lambda *given: last.append(given[2]))
        hidden_BTD = target.hidden(ids_BT)
        output_BTD = last[0][0] if isinstance(last[0], tuple) else last[0]
        assert torch.equal(found(output_BTD), hidden_BTD)


def test_more_than_modules_behind_the_layers_is_refused(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    assert len(behind_layers(model, "-")) == 1
    model.get_output_embeddings().register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
    with pytest.raises(UnsupportedArchitecture, match="more than apply modules"):
        behind_layers(model, "-")
