"""Heads that decoder layers of their own stand for, behind which one vocabulary matrix stands.

Shapes: R rows (any leading dimensions), K heads, D hidden, E = K * D, X columns of hidden states
with features.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import LayerShape
from medusa_heads.errors import first_line
from medusa_heads.heads.base import DraftHeads
from medusa_heads.heads.vocabulary import HasVocabulary, scaled


class DecoderHeads(DraftHeads):
    """K heads without a part of their own: `encode` makes what each says, [B, T, E], and an own
    vocabulary matrix is `lm_head.weight` [V, D]. Features are read in place of the target's last
    hidden state, made one by `encoder().fuse`."""

    one_module = True

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        if config.vocab_matrix == "own":
            assert config.hidden_size is not None
            self.lm_head = nn.Linear(config.hidden_size, config.num_candidates, bias=False)

    def _blocks(self, head: int) -> list[nn.Module]:
        return []

    def _own(self, head: int) -> nn.Linear:
        return self.lm_head

    def share(self, target: HasVocabulary) -> None:
        """See DraftHeads. Embeddings are read as the target has them: a norm comes behind."""
        super().share(target)
        self._embedding_scale = 1.0

    @torch.no_grad()
    def scale_to(self, hidden_BTX: Tensor) -> None:
        """Let fresh heads be as sure as the target's lm_head is, of whose hidden states these are
        some."""
        norm: Any = self.encoder().norm
        last_BTD = hidden_BTX[..., -norm.weight.numel() :].float()
        norm.weight.fill_(float(last_BTD.square().mean().sqrt()))

    @abstractmethod
    def encoder(self) -> Any:
        """The layers, and the norm behind them."""

    def fuse(self, hidden_RX: Tensor) -> Tensor:
        if self.config.features is None:
            return hidden_RX
        return self.encoder().fuse(hidden_RX[..., : -self._width].to(self.dtype))

    @property
    def _width(self) -> int:
        assert self.config.hidden_size is not None
        return self.config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder().norm.weight.dtype

    def features(self, hidden_RE: Tensor, tokens_RK: Tensor | None = None) -> Tensor:
        """See DraftHeads: what `encode` has made of each head."""
        every_RKD = hidden_RE.unflatten(-1, (self.config.num_heads, -1))
        return scaled(every_RKD, self.config.logit_scale)


class RotaryLayers(nn.Module):
    """Layers with rotary positions of transformers."""

    def keep_rotary(self, rotary: Any) -> None:
        # In a tuple, because its frequencies keep their precision whatever the layers are cast to.
        self._rotary = (rotary,)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The frequencies lie where the weights do: a step that fetches them waits."""
        moved, (rotary,) = super()._apply(fn, recurse), self._rotary
        weight = next(self.parameters(), None)  # others may hold them
        if weight is not None and not (weight.is_meta or rotary.inv_freq.is_meta):
            rotary.to(weight.device)
        return moved


def settings_of(
    shape: LayerShape, of_config: Any, of_rotary: Any, hidden_size: int, num_layers: int = 1
) -> tuple[Any, Any]:
    """The layers' configuration of a class of transformers, and their rotary positions. Raises
    ValueError: rope_parameters lack what their rule of positions wants."""
    try:
        config = shape.layer_config(of_config, hidden_size, num_layers)
        return config, of_rotary(config)
    except Exception as error:  # whatever it is that the rule does not expect
        raise ValueError(
            f"rope_parameters {shape.rope_parameters!r} say no positions: {first_line(error)}"
        ) from error
