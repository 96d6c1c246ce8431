"""A small Llama grown to a larger shape, whose logits stay the same.

Net2Net (Chen et al. 2015, arXiv:1511.05641) by zeros: what writes to new channels, or reads from
new heads, units and layers, is zero. All other new weights are noise of the old ones' spread,
because memory filled with zeros can be cheaper than a real model's.

Shapes: O rows and I columns of a matrix, S places, others as in shape.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from scripts.grown.shape import Placement, Shape

# The constant channel behind the final norm, and what rows of tokens that do not exist make of it:
# so little that heads do not feel it among their squares, so much that no logit is below theirs.
_CONSTANT_NORM = 2.0**-6
_NEVER = -(2.0**40)
WRITING = ("o_proj", "out_proj", "down_proj")  # to the residual stream


class Noise:
    """Random numbers for weights that nothing reads: one drawn block, laid side by side."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._block = torch.randn((1 << 20) - 3, generator=generator, device="cpu")

    def like(self, weight: Tensor, *size: int, dtype: torch.dtype) -> Tensor:
        """A tensor with the spread of `weight`, on its device."""
        count = torch.Size(size).numel()
        block = (self._block * float(weight.float().std(correction=0))).to(weight.device, dtype)
        return block.repeat(-(-count // len(block)))[:count].view(size)


def grow_llama(
    small: LlamaForCausalLM,
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> tuple[LlamaForCausalLM, Placement]:
    """A model of `shape` in `dtype` with the logits of `small`, up to rounding.

    It is made on `device`, by default that of `small`; nothing of its size is held elsewhere. Where
    no logits of `small` exist, for tokens beyond its vocabulary, they are hugely negative.
    The new model's configuration says what it was in `grown_from`.

    Raises:
        ValueError: it does not fit into that shape.
    """
    config: Any = small.config
    device = small.device if device is None else torch.device(device)
    with device:
        place = Placement(Shape.of(config), shape, config.rms_norm_eps)
    rope = config.rope_parameters["rope_type"]
    if shape.head_dim != config.head_dim and rope != "default":
        raise ValueError(
            f"rotary frequencies of type {rope!r} depend on head_dim: keep it at {config.head_dim}"
        )
    with device:
        noise = Noise(seed)
        state = {name: tensor.to(device) for name, tensor in small.state_dict().items()}
        grown = _outer(state, place, noise, dtype)
        grown |= grown_layers(state, place, lambda layer: _layer(layer, place, noise, dtype))
        large = grown_config(config, place, dtype=dtype, rms_norm_eps=place.epsilon)
        return assembled(LlamaForCausalLM, large, grown), place


def grown_layers(
    state: Mapping[str, Tensor],
    place: Placement,
    grow: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """The weights of all layers, each as `grow` makes it of a small one; those added are the
    identity."""
    grown = {}
    ends = [*place.layers[1:], place.large.num_hidden_layers]
    for old, (start, end) in enumerate(zip(place.layers, ends, strict=True)):
        prefix = f"model.layers.{old}."
        layer = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        for name, weight in grow(layer).items():
            silent = name.split(".")[-2] in WRITING
            for number in range(start, end):
                copy = torch.zeros_like(weight) if silent and number > start else weight.clone()
                grown[f"model.layers.{number}.{name}"] = copy
    return grown


def grown_config(config: Any, place: Placement, **settings: Any) -> Any:
    """The configuration at the large sizes, with other settings; it says what it was."""
    settings = config.to_dict() | asdict(place.large) | settings
    made = type(config)(**settings | {"tie_word_embeddings": False})
    made.grown_from = {"name_or_path": str(config._name_or_path), **asdict(place.small)}
    return made


def assembled(kind: Callable[[Any], Any], config: Any, state: Mapping[str, Tensor]) -> Any:
    """A model of that kind with these weights."""
    with torch.device("meta"):  # it takes these weights for its own, and makes none before
        model = kind(config)
    model.load_state_dict(state, assign=True)
    # All that is no weight: the frequencies, which follow from the configuration.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _outer(
    state: Mapping[str, Tensor], place: Placement, noise: Noise, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Embeddings, final norm and lm_head; of which the first and last are never one matrix: they
    differ in the constant channel."""
    small, large = place.small, place.large
    embedding_VD = state["model.embed_tokens.weight"]
    embedded = torch.zeros(large.vocab_size, large.hidden_size, dtype=dtype)
    embedded[: small.vocab_size, : small.hidden_size] = embedding_VD
    norm = grown_norm(state["model.norm.weight"], place, dtype)
    if place.constant:
        embedded[:, place.constant_channel] = place.constant
        norm[place.constant_channel] = _CONSTANT_NORM
    lm_head = state.get("lm_head.weight", embedding_VD)
    return {
        "model.embed_tokens.weight": embedded,
        "model.norm.weight": norm,
        "lm_head.weight": grown_vocabulary(lm_head, place, large.vocab_size, noise, dtype),
    }


def grown_vocabulary(
    old_VD: Tensor, place: Placement, vocab_size: int, noise: Noise, dtype: torch.dtype
) -> Tensor:
    """A vocabulary matrix [vocab_size, D']."""
    grown = noise.like(old_VD, vocab_size, place.large.hidden_size, dtype=dtype)
    grown[: len(old_VD), : place.small.hidden_size] = old_VD
    if place.constant:
        grown[: len(old_VD), place.constant_channel] = 0
        grown[len(old_VD) :, place.constant_channel] = _NEVER
    return grown


def grown_norm(weight_D: Tensor, place: Placement, dtype: torch.dtype) -> Tensor:
    """A norm's weights [D']; the constant channel does not come through."""
    grown = torch.ones(place.large.hidden_size, dtype=dtype)
    grown[: len(weight_D)] = weight_D.float() * place.norm_scale
    if place.constant:
        grown[place.constant_channel] = 0
    return grown


def _layer(
    layer: Mapping[str, Tensor], place: Placement, noise: Noise, dtype: torch.dtype
) -> dict[str, Tensor]:
    """One decoder layer: norms, attention, MLP."""
    small, large = place.small, place.large
    grown = {
        name: grown_norm(layer[name], place, dtype)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
    }
    channels, units = torch.arange(small.hidden_size), torch.arange(small.intermediate_size)
    queries = place.rows(place.queries)
    keys = place.rows([new for new, _ in place.keys])
    copied = torch.arange(small.num_key_value_heads * small.head_dim).view(-1, small.head_dim)
    copied = copied[[old for _, old in place.keys]].flatten()
    of_queries = large.num_attention_heads * large.head_dim
    of_keys = large.num_key_value_heads * large.head_dim
    reading = {
        "self_attn.q_proj": (queries, of_queries),
        "self_attn.k_proj": (keys, of_keys),
        "self_attn.v_proj": (keys, of_keys),
        "mlp.gate_proj": (units, large.intermediate_size),
        "mlp.up_proj": (units, large.intermediate_size),
    }
    for name, (rows_S, size) in reading.items():
        weight, bias = layer[f"{name}.weight"].float(), layer.get(f"{name}.bias")
        if name.endswith(("k_proj", "v_proj")):
            weight, bias = weight[copied], None if bias is None else bias[copied]
        scale = place.query_scale if name.endswith("q_proj") else 1.0
        # New channels are zero when they are read: what weighs them says nothing.
        matrix = noise.like(weight, size, large.hidden_size, dtype=dtype)
        if name.endswith("q_proj"):  # new dimensions of old heads must not add to their products
            matrix.view(-1, large.head_dim, large.hidden_size)[place.unlike_old] = 0
        matrix[rows_S[:, None], channels] = (weight * scale).to(dtype)
        grown[f"{name}.weight"] = matrix
        if bias is not None:
            grown[f"{name}.bias"] = _placed(bias.float() * scale, rows_S, size, dtype)
    for name, columns_S, size in (
        ("self_attn.o_proj", queries, of_queries),
        ("mlp.down_proj", units, large.intermediate_size),
    ):
        matrix = torch.zeros(large.hidden_size, size, dtype=dtype)
        matrix[channels[:, None], columns_S] = layer[f"{name}.weight"].to(dtype)
        grown[f"{name}.weight"] = matrix
        if f"{name}.bias" in layer:
            bias = layer[f"{name}.bias"]
            grown[f"{name}.bias"] = _placed(bias, channels, large.hidden_size, dtype)
    return grown


def _placed(values_S: Tensor, places_S: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Zeros, but for these values in their places."""
    placed = torch.zeros(size, dtype=dtype)
    placed[places_S] = values_S.to(dtype)
    return placed
