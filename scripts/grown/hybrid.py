"""A small Qwen3.5 hybrid of gated delta layers and attention grown to a larger shape, whose logits
stay the same.

As in llama.py, new parts write nothing, and noise stands wherever nothing reads it. What is written
to the residual stream grows with the root of the width: its mean of squares then stays, and with it
the epsilon, which norms within a head share. The vocabulary stays.

Shapes: O rows and I columns of a matrix, S places, D hidden; with a prime those of the large model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from scripts.grown.llama import (
    WRITING,
    Noise,
    assembled,
    grown_config,
    grown_layers,
    grown_vocabulary,
)
from scripts.grown.shape import Placement, Shape

_LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads")


def grow_hybrid(
    small: Any,
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> tuple[Any, Placement]:
    """A model of `shape`, but for its vocabulary, in `dtype` with the logits of `small`; heads of
    gated delta layers become more as those of attention do.

    Raises:
        ValueError: it does not fit into that shape.
    """
    config = small.config
    shape = shape.with_sizes({"vocab_size": config.vocab_size})
    if shape.head_dim != config.head_dim:
        raise ValueError(f"the heads of a hybrid are as wide as they were: {config.head_dim}")
    device = small.device if device is None else torch.device(device)
    with device:
        place = Placement(Shape.of(config), shape, config.rms_norm_eps, keeps_epsilon=True)
        large = grown_config(config, place, dtype=dtype, **_more_layers(config, place))
        layers = _Layers(config, large, place, Noise(seed), dtype)
        state = {name: tensor.to(device) for name, tensor in small.state_dict().items()}
        grown = layers.outer(state) | grown_layers(state, place, layers.layer)
        return assembled(Qwen3_5ForCausalLM, large, grown), place


def _more_layers(config: Any, place: Placement) -> dict[str, Any]:
    """The kinds of the large model's layers, and the heads of those of gated deltas."""
    ends = [*place.layers[1:], place.large.num_hidden_layers]
    kinds = [
        kind
        for kind, start, end in zip(config.layer_types, place.layers, ends, strict=True)
        for _ in range(start, end)
    ]
    more = place.large.num_attention_heads / place.small.num_attention_heads
    heads = {name: int(getattr(config, name) * more) for name in _LINEAR_HEADS}
    return {"layer_types": kinds, **heads}


class _Layers:
    """The weights of the large model, by name."""

    def __init__(
        self, small: Any, large: Any, place: Placement, noise: Noise, dtype: torch.dtype
    ) -> None:
        self._small, self._large, self._place = small, large, place
        self._noise, self._dtype = noise, dtype

    def outer(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Embeddings, final norm and lm_head."""
        embedding_VD = state["model.embed_tokens.weight"]
        lm_head_VD = state.get("lm_head.weight", embedding_VD)
        tokens = torch.arange(len(embedding_VD))
        return {
            "model.embed_tokens.weight": self._writing(
                embedding_VD.T, tokens, len(tokens)
            ).T.clone(),
            "model.norm.weight": self._norm(state["model.norm.weight"]),
            "lm_head.weight": grown_vocabulary(
                lm_head_VD, self._place, len(tokens), self._noise, self._dtype
            ),
        }

    def layer(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One decoder layer."""
        units = torch.arange(self._small.intermediate_size)
        places = {"mlp.": (units, self._large.intermediate_size)}
        places |= self._of_delta() if "linear_attn.A_log" in layer else self._of_attention()
        grown = {}
        for name, weight in layer.items():
            rows_S, size = next((v for k, v in places.items() if name.startswith(k)), (None, 0))
            if name.endswith("layernorm.weight"):
                grown[name] = self._norm(weight)
            elif rows_S is None:  # a norm within a head
                grown[name] = weight.to(self._dtype)
            elif name.split(".")[-2] in WRITING:
                grown[name] = self._writing(weight, rows_S, size)
            else:
                grown[name] = self._reading(weight[self._copied(name)], rows_S, size)
        return grown

    def _copied(self, name: str) -> Any:
        if "k_proj" not in name and "v_proj" not in name:
            return slice(None)
        heads = [old for _, old in self._place.keys]
        return _rows(heads, self._small.head_dim)

    def _of_attention(self) -> dict[str, tuple[Tensor, int]]:
        """Where the rows, or columns, of each matrix lie, and how many it has."""
        width, queries = self._large.head_dim, self._place.queries
        of_keys = _rows([new for new, _ in self._place.keys], width)
        heads, key_heads = self._large.num_attention_heads, self._large.num_key_value_heads
        return {
            "self_attn.q_proj": (_rows(queries, 2 * width), heads * 2 * width),  # with its gate
            "self_attn.k_proj": (of_keys, key_heads * width),
            "self_attn.v_proj": (of_keys, key_heads * width),
            "self_attn.o_proj": (_rows(queries, width), heads * width),
        }

    def _of_delta(self) -> dict[str, tuple[Tensor, int]]:
        small, large = self._small, self._large
        value_heads = torch.arange(small.linear_num_value_heads)
        keys = torch.arange(small.linear_num_key_heads * small.linear_key_head_dim)
        values = torch.arange(len(value_heads) * small.linear_value_head_dim)
        of_keys = large.linear_num_key_heads * large.linear_key_head_dim
        of_values = large.linear_num_value_heads * large.linear_value_head_dim
        mixed = torch.cat([keys, keys + of_keys, values + 2 * of_keys]), 2 * of_keys + of_values
        by_head = value_heads, large.linear_num_value_heads
        heads = dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), by_head)
        inner = dict.fromkeys(("in_proj_z", "out_proj"), (values, of_values))
        mixing = dict.fromkeys(("in_proj_qkv", "conv1d"), mixed)
        return {f"linear_attn.{name}": at for name, at in (heads | inner | mixing).items()}

    def _norm(self, weight_D: Tensor) -> Tensor:
        """Stored less 1; new channels are zero when they are read."""
        grown = torch.zeros(self._large.hidden_size)
        grown[: len(weight_D)] = (weight_D.float() + 1) * self._place.norm_scale - 1
        return grown.to(self._dtype)

    def _reading(self, weight: Tensor, rows_S: Tensor, size: int) -> Tensor:
        """Rows in their places, columns first, within noise."""
        columns = weight.shape[1:]
        if columns == (self._small.hidden_size,):
            columns = torch.Size([self._large.hidden_size])
        grown = self._noise.like(weight, size, *columns, dtype=self._dtype)
        if weight.ndim == 1:
            grown[rows_S] = weight.to(self._dtype)
        else:
            grown[rows_S, : weight.shape[1]] = weight.to(self._dtype)
        return grown

    def _writing(self, weight_DI: Tensor, columns_S: Tensor, size: int) -> Tensor:
        """[D', I'] that writes to the old channels what it did, at the scale of the new width."""
        grown = torch.zeros(self._large.hidden_size, size, dtype=self._dtype)
        channels = torch.arange(len(weight_DI))[:, None]
        grown[channels, columns_S] = (weight_DI.float() * self._place.written_scale).to(self._dtype)
        return grown


def _rows(heads: list[int], width: int) -> Tensor:
    """Rows at which the dimensions of these heads lie."""
    return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()
