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
        layers = Layers(place, Noise(seed), dtype)
        large = grown_config(config, place, dtype=dtype, rms_norm_eps=place.epsilon)
        return assembled(LlamaForCausalLM, large, layers, small, device), place


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


def assembled(
    kind: Callable[[Any], Any], config: Any, layers: Layers, small: Any, device: torch.device
) -> Any:
    """A model of that kind with the weights that `layers` makes of the small one's on a device."""
    state = {name: tensor.to(device) for name, tensor in small.state_dict().items()}
    grown = layers.outer(state) | grown_layers(state, layers.place, layers.layer)
    with torch.device("meta"):  # it takes these weights for its own, and makes none before
        model = kind(config)
    model.load_state_dict(grown, assign=True)
    # All that is no weight: the frequencies, which follow from the configuration.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


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


class Layers:
    """The weights of the large model, by their names in the small one."""

    def __init__(self, place: Placement, noise: Noise, dtype: torch.dtype) -> None:
        self.place, self.noise, self.dtype = place, noise, dtype

    def norm(self, weight_D: Tensor) -> Tensor:
        """A norm's weights, as they are stored."""
        return grown_norm(weight_D, self.place, self.dtype)

    def outer(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Embeddings, final norm and lm_head; of which the first and last are never one matrix:
        they differ in the constant channel."""
        place, large = self.place, self.place.large
        embedding_VD = state["model.embed_tokens.weight"]
        embedded = torch.zeros(large.vocab_size, large.hidden_size, dtype=self.dtype)
        embedded[: len(embedding_VD), : place.small.hidden_size] = self._written(embedding_VD)
        norm = self.norm(state["model.norm.weight"])
        if place.constant:
            embedded[:, place.constant_channel] = place.constant
            norm[place.constant_channel] = _CONSTANT_NORM
        lm_head = state.get("lm_head.weight", embedding_VD)
        return {
            "model.embed_tokens.weight": embedded,
            "model.norm.weight": norm,
            "lm_head.weight": grown_vocabulary(
                lm_head, place, large.vocab_size, self.noise, self.dtype
            ),
        }

    def layer(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One decoder layer."""
        places, grown = self.places(layer), {}
        for name, weight in layer.items():
            within = next((at for module, at in places.items() if name.startswith(module)), None)
            if name.endswith("layernorm.weight"):
                grown[name] = self.norm(weight)
            elif within is None:  # a norm within a head
                grown[name] = weight.to(self.dtype)
            elif name.split(".")[-2] in WRITING:
                grown[name] = self._writing(weight, *within)
            else:
                grown[name] = self._reading(name, weight, *within)
        return grown

    def places(self, _: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        """Where the old rows of a layer's modules lie, or columns of those that write, and how
        many there are of them."""
        place, large = self.place, self.place.large
        queries = place.rows(place.queries), large.num_attention_heads * large.head_dim
        keys = place.rows([new for new, _ in place.keys])
        of_keys = keys, large.num_key_value_heads * large.head_dim
        return {
            "self_attn.q_proj": queries,
            "self_attn.k_proj": of_keys,
            "self_attn.v_proj": of_keys,
            "self_attn.o_proj": queries,
            "mlp.": (torch.arange(place.small.intermediate_size), large.intermediate_size),
        }

    def _reading(self, name: str, weight: Tensor, rows_S: Tensor, size: int) -> Tensor:
        """Rows in their places, columns first, within noise; a bias within zeros."""
        place, weight = self.place, weight.float()
        if "k_proj" in name or "v_proj" in name:
            weight = weight[rows_of([old for _, old in place.keys], place.small.head_dim)]
        columns = weight.shape[1:]
        if columns == (place.small.hidden_size,):
            # New channels are zero when they are read: what weighs them says nothing.
            columns = torch.Size([place.large.hidden_size])
        if name.endswith(".bias"):
            grown = torch.zeros(size, dtype=self.dtype)
        else:
            grown = self.noise.like(weight, size, *columns, dtype=self.dtype)
        if "q_proj" in name:
            weight = weight * place.query_scale
            # New dimensions of old heads must not add to their products.
            grown.view(-1, place.large.head_dim, *columns)[place.unlike_old] = 0
        if weight.ndim == 1:
            grown[rows_S] = weight.to(self.dtype)
        else:
            grown[rows_S, : weight.shape[1]] = weight.to(self.dtype)
        return grown

    def _writing(self, weight: Tensor, columns_S: Tensor, size: int) -> Tensor:
        """[D', I'] that writes to the old channels what it did; or its bias, [D']."""
        width, channels = self.place.large.hidden_size, torch.arange(len(weight))
        grown = torch.zeros(width, *[size] * (weight.ndim - 1), dtype=self.dtype)
        at = (channels,) if weight.ndim == 1 else (channels[:, None], columns_S)
        grown[at] = self._written(weight)
        return grown

    def _written(self, weight: Tensor) -> Tensor:
        """What is added to the stream, at the scale of the new width."""
        return (weight.float() * self.place.written_scale).to(self.dtype)


def rows_of(heads: list[int], width: int) -> Tensor:
    """Rows at which the dimensions of these heads lie, where each has so many."""
    return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()
