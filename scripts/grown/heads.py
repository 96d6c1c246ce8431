"""Trained heads grown with their target: their logits stay the same.

Shapes: D hidden, V vocabulary of the heads, I columns; with a prime those of the grown heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from medusa_heads import TargetModel
from medusa_heads.checkpoint.checkpoint import LoadedHeads
from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS
from medusa_heads.heads import DecoderHeads, DraftHeads, new_heads
from scripts.grown.llama import Noise, grown_norm, grown_vocabulary
from scripts.grown.shape import Placement


def grow_heads(
    loaded: LoadedHeads, target: TargetModel, place: Placement, *, dtype: torch.dtype, seed: int = 0
) -> DraftHeads:
    """Heads of any kind on the grown `target`.

    Raises:
        ValueError: they were trained together with an adapter, read features or by induction, or
            have a layer of their own whose attention heads are of another width at the new size.
    """
    if isinstance(loaded.heads, DecoderHeads):
        raise ValueError(
            f"{loaded.heads.kind} heads are layers of their own, which do not grow with a target: "
            "grow medusa or hydra heads"
        )
    if loaded.stored.adapter is not None:
        raise ValueError(
            "heads that were trained together with an adapter of their target cannot be grown: "
            "merge the adapter into the target, and train heads for that"
        )
    config = replace(
        loaded.stored.config,
        hidden_size=place.large.hidden_size,
        vocab_size=place.large.vocab_size,
    )
    heads = new_heads(target, config, loaded.stored.tensors.get(DRAFT_TOKENS))
    if config.features is not None:
        raise ValueError(
            "features lie otherwise among the channels of a wider target: grow heads without them"
        )
    if config.induction:
        raise ValueError(
            "by induction heads compare states over all channels: grow heads without induction"
        )
    _check_prefix(loaded.heads, heads, place)
    heads.set_vocab_bias(loaded.stored.has_vocab_bias)
    # Embeddings are brought to unit scale over all channels and tokens, of which there are more.
    scale = loaded.heads._embedding_scale / heads._embedding_scale / place.written_scale
    grown = _Grown(place, Noise(seed), dtype, scale)
    names = heads.state_dict()
    heads.load_state_dict(
        {
            name: grown.tensor(name, tensor, tuple(names[name].shape))
            for name, tensor in loaded.stored.tensors.items()
        }
    )
    return heads.to(dtype).eval().requires_grad_(False)


def _check_prefix(small: DraftHeads, large: DraftHeads, place: Placement) -> None:
    if small.prefix is None or large.prefix is None:
        return
    before = place.small.hidden_size // small.prefix.num_attention_heads
    after = place.large.hidden_size // large.prefix.num_attention_heads
    if before != after:
        raise ValueError(
            f"the heads' own attention is {before} wide a head, at a hidden size of "
            f"{place.large.hidden_size} it would be {after}: ask for a multiple of {before}"
        )


class _Grown:
    """Tensors of heads by name."""

    def __init__(
        self, place: Placement, noise: Noise, dtype: torch.dtype, embedding_scale: float
    ) -> None:
        self._place, self._noise, self._dtype = place, noise, dtype
        self._scale = embedding_scale
        self._small, self._large = place.small.hidden_size, place.large.hidden_size

    def tensor(self, name: str, old: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The grown tensor, of `shape`."""
        if name == DRAFT_TOKENS:
            return old
        module, _, kind = name.rpartition(".")
        if module.startswith("prefix."):
            return self._prefix(module.rpartition(".")[2], old)
        if kind == "bias":
            return self._block(old[:, None], (shape[0], 1), quiet=True)[:, 0]
        if module.endswith("linear"):
            return self._reading(old)
        if module.endswith("res_connection"):
            matrix = self._reading(old)
            if self._place.constant:  # tokens that do not exist stay so
                matrix[self._place.constant_channel, self._place.constant_channel] = 1
            return matrix
        return grown_vocabulary(old, self._place, shape[0], self._noise, self._dtype)

    def _prefix(self, name: str, old: Tensor) -> Tensor:
        if name.endswith("norm"):
            return grown_norm(old, self._place, self._dtype)
        if name == "token":
            return self._reading(old, embedded_from=0)
        if name in ("attention_out", "down"):
            columns = old.shape[1] // self._small * self._large
            return self._block(old, (self._large, columns), quiet=True)
        parts = {"query_key_value": 3, "gate_up": 2}[name]
        rows = len(old) // parts // self._small * self._large
        grown = [self._block(part, (rows, self._large)) for part in old.chunk(parts)]
        return torch.cat(grown)

    def _reading(self, old: Tensor, embedded_from: int = 1) -> Tensor:
        """A matrix [D', I'] from D channels to D, which reads the hidden state and embeddings side
        by side, but never the constant; to new channels it writes nothing."""
        segments = []
        for place, part in enumerate(old.float().split(self._small, dim=1)):
            scaled = part * self._scale if place >= embedded_from else part
            segment = self._block(scaled, (self._large, self._large))
            segment[self._small :] = 0
            if self._place.constant:
                segment[:, self._place.constant_channel] = 0
            segments.append(segment)
        return torch.cat(segments, dim=1)

    def _block(self, old: Tensor, shape: tuple[int, int], *, quiet: bool = False) -> Tensor:
        """`old` in the upper left corner of noise, or of zeros."""
        if quiet:
            grown = torch.zeros(shape, dtype=self._dtype)
        else:
            grown = self._noise.like(old, *shape, dtype=self._dtype)
        grown[: old.shape[0], : old.shape[1]] = old
        return grown


def provenance_of_grown(loaded: LoadedHeads, place: Placement) -> dict[str, Any]:
    """What the heads' own provenance does not say: that they were grown, and from what."""
    stored: Mapping[str, Any] = loaded.stored.provenance
    made_of: dict[str, Any] = {"hidden_size": place.small.hidden_size}
    return {**stored, "grown_from": {**loaded.stored.target, **made_of}}
