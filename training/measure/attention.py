"""What a fresh prefix layer attends to.

Which positions tell what comes next, a run would else have to find out (docs/benchmarks/recipes.md,
"A prefix layer that attends as the target").

Shapes: D hidden, A attention heads of the prefix layer, E their width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.heads import DraftHeads
from medusa_heads.heads.text.prefix import PrefixLayer
from medusa_heads.heads.vocabulary import is_plain
from medusa_heads.target.layers import decoder_layers

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@torch.no_grad()
def attend_as_target(heads: DraftHeads, model: Any) -> bool:
    """Let a fresh prefix layer compare positions as the target's last layer does, and read of them
    what that reads; whether it does. What the heads say stays the same: the layer's output is
    nothing yet. Processes that share a target take part together."""
    if not isinstance(heads.prefix, PrefixLayer):
        return False
    attention_3AED = _attention_of_last_layer(model, heads.prefix)
    if attention_3AED is None:
        return False
    heads.prefix.attend_as(attention_3AED)
    return True


def _attention_of_last_layer(model: Any, layer: PrefixLayer) -> Tensor | None:
    """Queries, keys and values [3, A, E, D] of inputs that are normed without weights: where
    the target's last layer has plain matrices of these, and heads of the prefix layer's width or a
    multiple of it. Of a wider one there are several, which each compare every so many-th pair of
    its numbers."""
    try:
        found = _plain_attention(decoder_layers(model, "")[-1])
    except UnsupportedArchitecture:
        return None
    if found is None:
        return None
    norm, attention = found
    linears = [getattr(attention, name) for name in _PROJECTIONS]
    width, of_head = len(layer.down.weight), getattr(attention, "head_dim", None)
    own = width // layer.num_attention_heads
    queries, keys, values = (linear.weight.shape for linear in linears)
    if not of_head or of_head % own or keys[0] % of_head:
        return None
    if queries != (width, width) or keys != values or keys[1] != width:
        return None
    wider, like = of_head // own, layer.down.weight
    weights = [_whole(linear.weight).to(like).unflatten(0, (-1, of_head)) for linear in linears]
    # As much sharper or blunter as this target's scores are than usual ones of its heads' width.
    scaling = getattr(attention, "scaling", None) or of_head**-0.5
    weights[0] = weights[0] * (scaling * of_head**0.5 * wider**0.5)
    query, key, value = (
        part.repeat_interleave(width // of_head // len(part), dim=0) for part in weights
    )
    # Pairs lie half a head apart, and of more pairs the turns lie closer together.
    of_pairs = [
        part.unflatten(1, (2, -1, wider)).permute(0, 3, 1, 2, 4).reshape(-1, own, width)
        for part in (query, key)
    ]
    return torch.stack([*of_pairs, value.reshape(-1, own, width)]) * _scales(norm, like)


def _plain_attention(last: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The norm before it and itself, where it has linear layers for queries, keys and values, and
    nothing else behind these."""
    for module in last.modules():
        linears = [getattr(module, name, None) for name in _PROJECTIONS]
        if all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
            weights = [linear.weight for linear in linears if linear is not None]
            norm: nn.Module | None = getattr(last, "input_layernorm", None)
            names = [name for name, _ in module.named_children()]
            normed = any("norm" in name and name.startswith(("q", "k")) for name in names)
            if norm is None or normed:
                return None
            plain = all(is_plain(weight) and not weight.is_meta for weight in weights)
            return (norm, module) if plain else None
    return None


def _scales(norm: nn.Module, like_XD: Tensor) -> Tensor:
    """What a norm multiplies each number by [D], whether it takes off the mean or not, adds a bias
    or not, and keeps its weights less one or not. It runs on its own device, where accelerate
    would hand on what it is given."""
    parts = {name: _whole(part).to(like_XD.dtype) for name, part in norm.named_parameters()}
    device = next((part.device for part in parts.values()), like_XD.device)
    signs_D = like_XD.new_ones(like_XD.shape[0], device=device)
    signs_D[::2] = -1
    up_D, down_D = (functional_call(norm, parts, (sign * signs_D,)) for sign in (1, -1))
    return ((up_D - down_D) / 2 * signs_D).to(like_XD.device)


def _whole(weight: Any) -> Tensor:
    """All of a weight of which this process may have a part."""
    whole: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return whole
