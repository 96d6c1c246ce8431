"""Where the parts of a small model lie within a larger one.

Shapes: D hidden, H attention heads, X their width, L layers, V vocabulary; of the small model, with
a prime of the large one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, as its configuration names them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The shape that a configuration describes."""
        return cls(**{name: getattr(config, name) for name in cls.names()})

    @classmethod
    def names(cls) -> list[str]:
        """Of all sizes."""
        return [field.name for field in fields(cls)]

    def with_sizes(self, sizes: Mapping[str, int | None]) -> Shape:
        """This shape with those sizes that are given, not None, instead of its own."""
        return Shape(**(asdict(self) | {k: v for k, v in sizes.items() if v is not None}))


SHAPES = {
    "0.1b": Shape(768, 2048, 12, 12, 12, 64, 32000),
    "1b": Shape(2048, 5632, 22, 32, 4, 64, 32000),  # TinyLlama 1.1B
    "7b": Shape(4096, 11008, 32, 32, 32, 128, 32000),  # Llama 2 7B
}


class Placement:
    """Places of a small model's parts.

    Tokens beyond the small vocabulary must never be written, and a Llama's lm_head has no bias to
    see to that. So the last channel, which the small model does not have, carries a constant from
    the embeddings to the lm_head, where their rows alone read it, with a large negative weight. The
    constant enters every mean of squares; the norms' epsilon is so much smaller, and takes it out.

    Args:
        small: the shape to grow.
        large: what it grows to.
        epsilon: of the small model's norms.
        keeps_epsilon: of the norms, by writing what they read so much larger.

    Attributes:
        layers: of each layer its place; the others are the identity, spread evenly, so that a share
            of the layers is the same share of the small model's.
        queries: of each query head its place.
        keys: place of a key-value head, and which head of the small model lies there: groups of
            other sizes need several copies of one.
        dims: of each dimension within a head its place, so that it turns with the same frequency.
        norm_scale: of the norms' weights, which see the same squares among more channels.
        written_scale: of what is written, so that its mean of squares stays where epsilon does.
        query_scale: of the queries, whose products are divided by the root of their width.
        constant: what the last channel holds, 0.0 where the vocabulary does not grow.
        epsilon: of the large model's norms.

    Raises:
        ValueError: a part would shrink, or has no place.
    """

    def __init__(
        self, small: Shape, large: Shape, epsilon: float, *, keeps_epsilon: bool = False
    ) -> None:
        _check(small, large)
        self.small, self.large = small, large
        group = small.num_attention_heads // small.num_key_value_heads
        large_group = large.num_attention_heads // large.num_key_value_heads
        copies = -(-group // large_group)
        if small.num_key_value_heads * copies > large.num_key_value_heads:
            raise ValueError(
                f"{large.num_key_value_heads} key-value heads of {large_group} query heads each do "
                f"not hold {small.num_key_value_heads} of {group} each: ask for "
                f"{small.num_key_value_heads * copies} or more, or fewer heads a group"
            )
        self.layers = [
            i * large.num_hidden_layers // small.num_hidden_layers
            for i in range(small.num_hidden_layers)
        ]
        self.keys = [
            (head * copies + copy, head)
            for head in range(small.num_key_value_heads)
            for copy in range(copies)
        ]
        self.queries = [
            (head * copies + i // large_group) * large_group + i % large_group
            for head in range(small.num_key_value_heads)
            for i in range(group)
        ]
        every = large.head_dim // small.head_dim
        half = torch.arange(small.head_dim // 2) * every
        self.dims = torch.cat([half, half + large.head_dim // 2])  # rotary: halves face each other
        self.norm_scale = math.sqrt(small.hidden_size / large.hidden_size)
        self.written_scale = 1 / self.norm_scale if keeps_epsilon else 1.0
        self.query_scale = math.sqrt(large.head_dim / small.head_dim)
        self.constant = _constant(small, large, epsilon)
        squares = epsilon * small.hidden_size - self.constant**2
        self.epsilon = squares / large.hidden_size

    @property
    def constant_channel(self) -> int:
        """The channel that holds the constant."""
        return self.large.hidden_size - 1

    @property
    def unlike_old(self) -> tuple[Tensor, Tensor]:
        """Of the query heads that the small model has, those dimensions that it has not."""
        new = torch.ones(self.large.head_dim, dtype=torch.bool)
        new[self.dims] = False
        return torch.tensor(self.queries)[:, None], new.nonzero().flatten()

    def rows(self, heads: list[int]) -> Tensor:
        """Rows of a projection at which the dimensions of these heads lie."""
        starts = torch.tensor(heads) * self.large.head_dim
        return (starts[:, None] + self.dims).flatten()


def _check(small: Shape, large: Shape) -> None:
    for name, least in asdict(small).items():
        got = getattr(large, name)
        if got < least:
            raise ValueError(f"{name} would shrink from {least} to {got}: a target only grows")
    if large.hidden_size % large.num_attention_heads:
        raise ValueError(
            f"hidden_size {large.hidden_size} is no multiple of {large.num_attention_heads} "
            "attention heads, as a Llama's must be"
        )
    if large.num_attention_heads % large.num_key_value_heads:
        raise ValueError(
            f"{large.num_attention_heads} attention heads do not share "
            f"{large.num_key_value_heads} key-value heads evenly: ask for a divisor"
        )
    if large.head_dim % small.head_dim or small.head_dim % 2:
        raise ValueError(
            f"head_dim must grow to a multiple of {small.head_dim}, whose rotary frequencies are "
            f"among its own, got {large.head_dim}"
        )
    if large.vocab_size > small.vocab_size and large.hidden_size == small.hidden_size:
        raise ValueError(
            f"a larger vocabulary ({large.vocab_size}) needs a channel of its own: let hidden_size "
            f"grow beyond {small.hidden_size} as well"
        )


def _constant(small: Shape, large: Shape, epsilon: float) -> float:
    if large.vocab_size == small.vocab_size:
        return 0.0
    if not epsilon > 0:
        raise ValueError("a larger vocabulary needs norms with an epsilon above 0 (rms_norm_eps)")
    # A power of two is exact in every dtype; half of what epsilon could take out.
    return float(2.0 ** math.floor(math.log2(epsilon * small.hidden_size / 2) / 2))
