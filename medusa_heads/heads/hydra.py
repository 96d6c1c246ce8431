"""Hydra heads: each also sees the tokens that were drafted before its own.

Shapes: R rows (any leading dimensions), B batch, F paths, J tokens of a path, K heads, D hidden,
V vocabulary, W input width, E what `encode` leaves: D, with induction D + K * D.
Source: Ankner et al. 2024, "Hydra: sequentially-dependent draft heads for Medusa decoding",
arXiv:2402.05109, sections 3 and 4.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from medusa_heads.heads.base import After, DraftHeads, product_dtype
from medusa_heads.heads.medusa import ResBlock, WideBlock
from medusa_heads.heads.text.induction import of_each
from medusa_heads.heads.vocabulary import scaled


class HydraHeads(DraftHeads):
    """K sequential heads: head i reads h_t and the embeddings of tokens t + 1 .. t + 1 + i.

    `{i}.0.linear` and `{i}.0.res_connection` [D, D * (i + 2)], later blocks as Medusa's.
    """

    kind = "hydra"
    reads_drafts = True

    def _blocks(self, head: int) -> list[nn.Module]:
        assert self.config.hidden_size is not None
        later = [ResBlock(self.config.hidden_size) for _ in range(self.config.num_layers - 1)]
        return [WideBlock(self.config.hidden_size, head + 1), *later]

    def features(self, hidden_RD: Tensor, tokens_RK: Tensor | None = None) -> Tensor:
        """See DraftHeads. ValueError where `tokens_RK` is missing."""
        if tokens_RK is None:
            raise ValueError("hydra heads see the tokens between: pass tokens_RK")
        heads = range(self.config.num_heads)
        features = [self.head_features(i, hidden_RD, tokens_RK[..., : i + 1]) for i in heads]
        return torch.stack(features, dim=-2)

    def head_features(self, head: int, hidden_RE: Tensor, tokens_RJ: Tensor) -> Tensor:
        """Features of one head after its J = head + 1 tokens t + 1 .. t + 1 + head:
        (..., E), (..., J) -> (..., D)."""
        sequence: Any = self._modules[str(head)]
        assert self.config.hidden_size is not None
        hidden_RD, states_RKD = of_each(hidden_RE, self.config.hidden_size)
        embedded_RX = self.embed(tokens_RJ).flatten(-2)
        x = torch.cat([hidden_RD, embedded_RX.to(hidden_RD.dtype)], dim=-1)
        x = x.to(product_dtype(next(self.parameters())))
        for block in islice(sequence, self.config.num_layers):
            x = block(x)
        if states_RKD is not None:
            x = x + states_RKD[..., head, :].to(x.dtype)
        return scaled(x, self.config.logit_scale)

    def after_paths(self, hidden_BD: Tensor, likely: int | None = None) -> After:
        """See DraftHeads. Each path has its own likely tokens, and so all are corrected."""

        def after(head: int, paths_BFJ: Tensor, above_BF: Tensor) -> tuple[Tensor, None]:
            hidden_BFD = hidden_BD[:, None].expand(-1, paths_BFJ.shape[1], -1)
            logits_BFV = self.project(head, self.head_features(head, hidden_BFD, paths_BFJ))
            return self.corrected(logits_BFV, paths_BFJ[..., -1]), None

        return after
