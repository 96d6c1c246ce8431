"""A small Qwen3.5 hybrid of gated delta layers and attention grown to a larger shape, whose logits
stay the same.

As in llama.py, new parts write nothing, and noise stands wherever nothing reads it. What is written
to the residual stream grows with the root of the width: its mean of squares then stays, and with it
the epsilon, which norms within a head share. The vocabulary stays.

Shapes: S places, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from scripts.grown.llama import Layers, Noise, assembled, grown_config, grown_norm, rows_of
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
        layers = _Layers(place, Noise(seed), dtype, config, large)
        return assembled(Qwen3_5ForCausalLM, large, layers, small, device), place


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


class _Layers(Layers):
    def __init__(
        self, place: Placement, noise: Noise, dtype: torch.dtype, small: Any, large: Any
    ) -> None:
        super().__init__(place, noise, dtype)
        self._small, self._large = small, large

    def norm(self, weight_D: Tensor) -> Tensor:
        """Stored less 1."""
        grown = grown_norm(weight_D.float() + 1, self.place, torch.float32) - 1
        return grown.to(self.dtype)

    def places(self, layer: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        """With those of gated delta layers, and queries with their gates."""
        width = 2 * self._large.head_dim
        gated = rows_of(self.place.queries, width), self._large.num_attention_heads * width
        found = super().places(layer) | {"self_attn.q_proj": gated}
        return found | self._of_delta() if "linear_attn.A_log" in layer else found

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
