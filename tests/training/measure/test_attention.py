"""A fresh prefix layer attends as the target's last layer does, and says nothing yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.hooks import attach_execution_device_hook
from torch import Tensor, nn

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.measure.attention import attend_as_target
from tests.conftest import TinyLlama

WIDTH, LENGTH = 128, 9


def of_width(tiny_llama: TinyLlama, heads: int, keys: int, **more: Any) -> TargetModel:
    shape = {"hidden_size": WIDTH, "num_attention_heads": heads, "num_key_value_heads": keys}
    target = TargetModel(tiny_llama(**shape, head_dim=WIDTH // heads, **more))
    target.freeze()
    torch.manual_seed(0)
    for name, weight in target.model.named_parameters():
        if "input_layernorm" in name:
            nn.init.uniform_(weight, 0.5, 2.0)
    return target


def fresh(target: TargetModel, **settings: Any) -> DraftHeads:
    return new_heads(target, HeadsConfig(num_heads=2, prefix_attention=True, **settings))


def read(target: TargetModel, heads: DraftHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Some states, what the target's last layer reads at them, and what the prefix layer does."""
    layer, last = heads.prefix, target.model.model.layers[-1]
    x_BTD = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    positions_BT = torch.arange(LENGTH)[None]
    seen: list[Tensor] = []
    with last.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        turns = target.model.model.rotary_emb(x_BTD, positions_BT)
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
        last(x_BTD, position_embeddings=turns, attention_mask=mask)
    query, keys, values = layer.project(x_BTD, positions_BT, LENGTH)
    own = nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
    return x_BTD, seen[0], own.transpose(1, 2).flatten(2)


@torch.no_grad()
@pytest.mark.parametrize("keys", [1, 2])
def test_it_reads_what_the_target_reads(tiny_llama: TinyLlama, keys: int) -> None:
    target = of_width(tiny_llama, 2, keys)
    target.model.model.layers[-1].self_attn.scaling = 0.3
    heads = fresh(target)
    assert attend_as_target(heads, target.model)
    x_BTD, wanted_BTD, own_BTD = read(target, heads)
    torch.testing.assert_close(own_BTD, wanted_BTD, rtol=1e-3, atol=1e-4)
    # The layer is the identity as before: heads say what they said.
    torch.testing.assert_close(heads.prefix(x_BTD, x_BTD), x_BTD)


@torch.no_grad()
def test_wider_heads_are_shared_out(tiny_llama: TinyLlama) -> None:
    """Where nothing is turned the mean of their scores is that of the target, and each keeps its
    part of the values."""
    target = of_width(tiny_llama, 1, 1)
    heads = fresh(target)
    assert heads.prefix.num_attention_heads == 2 and attend_as_target(heads, target.model)
    last = target.model.model.layers[-1]
    attention, norm = last.self_attn, last.input_layernorm
    x_BTD = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    first_BT = torch.zeros(1, LENGTH, dtype=torch.long)
    query_BATE, keys_BATE, values_BATE = heads.prefix.project(x_BTD, first_BT, LENGTH)
    own_BTT = (query_BATE @ keys_BATE.mT / 64**0.5).mean(dim=1)
    queries_BTD, keys_BTD, values_BTD = (
        linear(norm(x_BTD)) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    wanted_BTT = queries_BTD @ keys_BTD.mT / WIDTH**0.5
    torch.testing.assert_close(own_BTT, wanted_BTT, rtol=1e-3, atol=1e-4)
    own_BTD = values_BATE.transpose(1, 2).flatten(2)
    torch.testing.assert_close(own_BTD, values_BTD, rtol=1e-3, atol=1e-4)


def no_prefix(target: TargetModel) -> DraftHeads:
    return new_heads(target, HeadsConfig(num_heads=2))


def block(target: TargetModel) -> DraftHeads:
    return new_heads(target, HeadsConfig(num_heads=2, kind="block"))


@pytest.mark.parametrize(
    ("change", "make"),
    [
        ({}, no_prefix),
        ({}, block),
        ({"attention_bias": True}, fresh),
        ({"heads": 4}, fresh),  # narrower than those of the prefix layer
    ],
    ids=["no layer", "a block", "biases", "narrow"],
)
def test_other_layers_begin_as_they_did(
    tiny_llama: TinyLlama, change: dict[str, Any], make: Any
) -> None:
    change = {"heads": 2, "keys": 2} | change
    target = of_width(tiny_llama, **change)
    torch.manual_seed(1)
    heads = make(target)
    before = {name: part.clone() for name, part in heads.state_dict().items()}
    assert not attend_as_target(heads, target.model)
    target.model.model.layers[-1].self_attn.head_dim = None
    assert not attend_as_target(heads, target.model)
    assert all(torch.equal(before[name], part) for name, part in heads.state_dict().items())


@torch.no_grad()
def test_norms_of_every_form_are_read(tiny_llama: TinyLlama) -> None:
    """With means taken off and biases, and with weights that are kept less one."""

    class LessOne(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.rms_norm(x, self.normalized_shape) * (1 + self.weight)

    scales_D = torch.linspace(0.5, 2.0, WIDTH)
    norm = nn.LayerNorm(WIDTH)
    norm.bias.fill_(3.0)
    for each, weight_D in ((norm, scales_D), (LessOne(WIDTH), scales_D - 1)):
        target = of_width(tiny_llama, 2, 2)
        each.weight.copy_(weight_D)
        target.model.model.layers[-1].input_layernorm = each
        heads = fresh(target)
        assert attend_as_target(heads, target.model)
        values_DD = heads.prefix.query_key_value.weight[2 * WIDTH :]
        expected_DD = target.model.model.layers[-1].self_attn.v_proj.weight * scales_D
        torch.testing.assert_close(values_DD, expected_DD, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_the_last_layer_may_lie_on_another_device(tiny_llama: TinyLlama) -> None:
    """Where accelerate hands what its modules are given on to theirs, as a device_map has it."""
    target = of_width(tiny_llama, 2, 2)
    heads = fresh(target)
    heads.prefix.to("meta")
    attach_execution_device_hook(target.model.model.layers[-1], target.device)
    assert attend_as_target(heads, target.model)


@pytest.mark.parametrize("name", ["q_norm", "k_layernorm", "query_layernorm", "qk_norm"])
def test_norms_behind_queries_have_many_names(tiny_llama: TinyLlama, name: str) -> None:
    target = of_width(tiny_llama, 2, 2)
    setattr(target.model.model.layers[-1].self_attn, name, nn.RMSNorm(WIDTH // 2))
    assert not attend_as_target(fresh(target), target.model)
