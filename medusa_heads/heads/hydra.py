"""Hydra heads: each also sees the tokens that were drafted before its own.

Shapes: R rows (any leading dimensions), B batch, T tokens, K heads, D hidden, W input width.
Source: Ankner et al. 2024, "Hydra: sequentially-dependent draft heads for Medusa decoding",
arXiv:2402.05109, sections 3 and 4.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_heads.config import HeadsConfig
from medusa_heads.heads.base import DraftHeads, HasVocabulary, ResBlock
from medusa_heads.heads.prefix import PrefixLayer


class WideBlock(nn.Module):
    """`V x + SiLU(W x + b)` from the hidden state and `num_tokens` embeddings, side by side.

    V starts as the choice of the hidden state alone and W at zero: a fresh block hands it on.
    """

    def __init__(self, hidden_size: int, num_tokens: int) -> None:
        super().__init__()
        width = hidden_size * (1 + num_tokens)
        self.linear = nn.Linear(width, hidden_size)
        self.res_connection = nn.Linear(width, hidden_size)
        for module in (self.linear, self.res_connection):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        with torch.no_grad():
            self.res_connection.weight[:, :hidden_size].fill_diagonal_(1.0)

    def forward(self, x_RW: Tensor) -> Tensor:
        out: Tensor = self.res_connection(x_RW) + F.silu(self.linear(x_RW))
        return out


class HydraHeads(DraftHeads):
    """K sequential heads: head i reads h_t and the embeddings of tokens t + 1 .. t + 1 + i.

    `{i}.0.linear` and `{i}.0.res_connection` [D, D * (i + 2)], later blocks as Medusa's; `prefix.*`
    where `config.prefix_attention` is set.

    Embeddings are the target's own, brought to unit scale: beside a normalised hidden state the
    often tiny vectors would be learnt from far too slowly.
    """

    kind = "hydra"
    sequential = True

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        assert config.hidden_size is not None
        self.prefix = PrefixLayer(config.hidden_size) if config.prefix_attention else None
        self._embeddings_VD: Tensor | None = None
        self._embedding_scale = 1.0

    def _blocks(self, head: int) -> list[nn.Module]:
        assert self.config.hidden_size is not None
        later = [ResBlock(self.config.hidden_size) for _ in range(self.config.num_layers - 1)]
        return [WideBlock(self.config.hidden_size, head + 1), *later]

    def share(self, target: HasVocabulary) -> None:
        """See DraftHeads; the target's token embeddings are read too.

        Raises:
            ValueError: they are quantised, or not as wide as the hidden state.
        """
        super().share(target)
        model: Any = target
        embeddings_VD = getattr(model.get_input_embeddings(), "weight", None)
        if (
            not isinstance(embeddings_VD, Tensor)
            or not embeddings_VD.is_floating_point()
            or embeddings_VD.shape[1:] != (self.config.hidden_size,)
        ):
            raise ValueError(
                "hydra heads need a target with unquantised token embeddings as wide as its hidden "
                f"state of {self.config.hidden_size}: use kind 'medusa'"
            )
        self._embeddings_VD = embeddings_VD.detach()
        norm = torch.linalg.vector_norm(self._embeddings_VD, dtype=torch.float32)
        self._embedding_scale = float(self._embeddings_VD.numel() ** 0.5 / norm.clamp_min(1e-6))

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings of tokens at unit scale: (...) -> (..., D)."""
        assert self._embeddings_VD is not None, "share(target) comes first"
        return F.embedding(tokens, self._embeddings_VD) * self._embedding_scale

    def encode(
        self, hidden_BTD: Tensor, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """See DraftHeads: the prefix layer over h_t and the embedding of token t + 1.

        Behind the last token stands none; what is made of that position is of no use.
        """
        if self.prefix is None:
            return hidden_BTD
        following_BT = F.pad(input_ids_BT[:, 1:], (0, 1))
        dtype = self.prefix.dtype
        return self.prefix(
            hidden_BTD.to(dtype), self.embed(following_BT).to(dtype), position_ids_BT
        )

    def features(self, hidden_RD: Tensor, tokens_RK: Tensor | None = None) -> Tensor:
        """See DraftHeads.

        Raises:
            ValueError: `tokens_RK` is missing.
        """
        if tokens_RK is None:
            raise ValueError("hydra heads see the tokens between: pass tokens_RK")
        features = [
            self.head_features(i, hidden_RD, tokens_RK[..., : i + 1])
            for i in range(self.config.num_heads)
        ]
        return torch.stack(features, dim=-2)

    def head_features(self, head: int, hidden_RD: Tensor, tokens_RJ: Tensor) -> Tensor:
        """Features of one head after its J = head + 1 tokens t + 1 .. t + 1 + head:
        (..., D), (..., J) -> (..., D)."""
        sequence: Any = self._modules[str(head)]
        embedded_RX = self.embed(tokens_RJ).flatten(-2)
        x = torch.cat([hidden_RD, embedded_RX.to(hidden_RD.dtype)], dim=-1)
        x = x.to(next(self.parameters()).dtype)
        for block in islice(sequence, self.config.num_layers):
            x = block(x)
        return x
