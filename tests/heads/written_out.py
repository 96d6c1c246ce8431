"""EAGLE-3's layer and its chains, written out tensor by tensor after the authors' model.

Shapes: T positions, K steps, H attention heads, D hidden, E width of an attention head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.decoder_shape import DecoderShape


def layer(
    tensors: Mapping[str, Tensor], shape: DecoderShape, states_TD: Tensor, embedded_TD: Tensor
) -> Tensor:
    """What comes out of the layer, before the last norm; `tensors` under the authors' names."""
    of = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items()}

    def norm(name: str, x: Tensor) -> Tensor:
        weight = of[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, shape.rms_norm_eps)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, of[f"{name}.weight"], of.get(f"{name}.bias"))

    def heads(name: str, x: Tensor) -> Tensor:
        x_HTE = linear(f"self_attn.{name}", x).unflatten(-1, (-1, shape.head_dim)).transpose(0, 1)
        return x_HTE.repeat_interleave(shape.num_attention_heads // len(x_HTE), 0)

    def turned(x_HTE: Tensor) -> Tensor:
        shares = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        places = torch.arange(x_HTE.shape[1])[:, None]
        angles = places * float(shape.rope_parameters["rope_theta"]) ** -shares
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x_HTE.chunk(2, -1)
        return x_HTE * cos + torch.cat([-second, first], -1) * sin

    normed_TD = norm("hidden_norm", states_TD)
    both = torch.cat([norm("input_layernorm", embedded_TD), normed_TD], -1)
    queries, keys = turned(heads("q_proj", both)), turned(heads("k_proj", both))
    mixed_HTE = F.scaled_dot_product_attention(
        queries[None], keys[None], heads("v_proj", both)[None], is_causal=True
    )[0]
    x_TD = normed_TD if shape.norm_before_residual else states_TD
    x_TD = x_TD + linear("self_attn.o_proj", mixed_HTE.transpose(0, 1).flatten(1))
    inner_TD = norm("post_attention_layernorm", x_TD)
    gate, up = linear("mlp.gate_proj", inner_TD), linear("mlp.up_proj", inner_TD)
    return x_TD + linear("mlp.down_proj", F.silu(gate) * up)


def chain(
    tensors: Mapping[str, Tensor],
    shape: DecoderShape,
    states_TD: Tensor,
    embedded_TD: Tensor,
    steps: int,
    *,
    norm_output: bool,
) -> Tensor:
    """What the vocabulary matrix reads of each step behind a text [K, D]: the layer reads all of it
    again for each, and of each step before what that handed on. `embedded_TD` are K - 1 longer."""
    said = []
    for _ in range(steps):
        out_D = layer(tensors, shape, states_TD, embedded_TD[: len(states_TD)])[-1]
        weight_D = tensors["norm.weight"]
        normed_D = F.rms_norm(out_D, weight_D.shape, weight_D, shape.rms_norm_eps)
        said.append(normed_D)
        states_TD = torch.cat([states_TD, (normed_D if norm_output else out_D)[None]])
    return torch.stack(said)
