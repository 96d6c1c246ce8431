"""Medusa heads: each guesses from the target's last hidden state alone.

Shapes: R rows (any leading dimensions), K heads, D hidden, W input width, or what a block's
products have together.
Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, section 2.1.1.
"""

from __future__ import annotations

from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_heads.config import HeadsConfig
from medusa_heads.heads.base import DraftHeads, product_dtype
from medusa_heads.heads.text.induction import of_each
from medusa_heads.heads.vocabulary import scaled


class ResBlock(nn.Module):
    """`x + SiLU(W x + b)`, the identity while W and b are zero, as they start."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_RD: Tensor) -> Tensor:
        return x_RD + F.silu(self.linear(x_RD))


class WideBlock(nn.Module):
    """`V x + SiLU(W x + b)` from the hidden state and `num_tokens` embeddings, side by side: its
    shortcut is a projection (He et al. 2016, arXiv:1512.03385, section 3.2).

    V starts as the choice of the hidden state alone and W at zero: a fresh block hands it on.
    """

    def __init__(self, hidden_size: int, num_tokens: int) -> None:
        super().__init__()
        width = hidden_size * (1 + num_tokens)
        self.linear = nn.Linear(width, hidden_size)
        self.res_connection = nn.Linear(width, hidden_size)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        with torch.no_grad():
            self.res_connection.weight[:, :hidden_size].fill_diagonal_(1.0)

    def forward(self, x_RW: Tensor) -> Tensor:
        return self.res_connection(x_RW) + F.silu(self.linear(x_RW))


class MedusaHeads(DraftHeads):
    """K independent heads of residual blocks: `{i}.{l}.linear.weight` [D, D], `.bias` [D], and with
    a linear shortcut `{i}.0.res_connection.weight`, `.bias` likewise."""

    kind = "medusa"

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self._stack: tuple[list[tuple[int, int]], list[tuple[Tensor, Tensor]]] | None = None
        # Kept, because finding them anew costs more than a head's own work on a small target.
        self._all_parameters = tuple(p for head in self.heads() for p in head.parameters())

    def _blocks(self, head: int) -> list[nn.Module]:
        width = self.config.hidden_size
        assert width is not None
        blocks: list[nn.Module] = [ResBlock(width) for _ in range(self.config.num_blocks)]
        if self.config.linear_shortcut:
            blocks[0] = WideBlock(width, 0)
        return blocks

    def train(self, mode: bool = True) -> MedusaHeads:
        """See nn.Module."""
        # Fused optimisers write to parameters without leaving a trace in their versions.
        self._stack = None
        return super().train(mode)

    def features(self, hidden_RE: Tensor, tokens_RK: Tensor | None = None) -> Tensor:
        """See DraftHeads. `tokens_RK` plays no part: these heads do not see each other."""
        assert self.config.hidden_size is not None
        hidden_RD, states_RKD = of_each(hidden_RE, self.config.hidden_size)
        # Any wider, every head would round it for itself.
        inputs_RKD = self._inputs(hidden_RD.to(product_dtype(self._all_parameters[0])))
        exact = type(next(self.heads())[0].linear) is nn.Linear
        if hidden_RD.ndim == 2 and exact and not torch.is_grad_enabled():
            # One product for the blocks of all heads: while decoding, calls cost more than sums.
            x_KRD = inputs_RKD.transpose(0, 1)
            for weight_KDW, bias_K1W in self._stacked():
                made_KRW = torch.baddbmm(bias_K1W, x_KRD, weight_KDW)
                if made_KRW.shape[-1] > x_KRD.shape[-1]:
                    made_KRW, x_KRD = made_KRW.chunk(2, dim=-1)
                x_KRD = x_KRD + F.silu(made_KRW)
            return self._said(x_KRD.transpose(0, 1), states_RKD)
        features = []
        for i, head in enumerate(self.heads()):
            x_RD = inputs_RKD[..., i, :]
            for block in islice(head, self.config.num_blocks):
                x_RD = block(x_RD)
            features.append(x_RD)
        return self._said(torch.stack(features, dim=-2), states_RKD)

    def _said(self, made_RKD: Tensor, states_RKD: Tensor | None) -> Tensor:
        """Features, of what the blocks made, with the states that induction adds."""
        if states_RKD is not None:
            made_RKD = made_RKD + states_RKD.to(made_RKD.dtype)
        return scaled(made_RKD, self.config.logit_scale)

    def _inputs(self, hidden_RD: Tensor) -> Tensor:
        """What each head's blocks read: (..., D) -> (..., K, D)."""
        return hidden_RD[..., None, :].expand(*hidden_RD.shape[:-1], self.config.num_heads, -1)

    def _stacked(self) -> list[tuple[Tensor, Tensor]]:
        """Every layer's weights [K, D, W], transposed, and biases [K, 1, W], those of a linear
        shortcut behind the others; made anew when a parameter was written to or moved."""
        if torch.compiler.is_compiling() and self._stack is not None:
            return self._stack[1]  # which reads no addresses
        # What inference mode has made has no version.
        state = [
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for tensor in self._all_parameters
        ]
        if self._stack is None or self._stack[0] != state:
            blocks = [list(islice(head, self.config.num_blocks)) for head in self.heads()]
            layers = []
            for layer in zip(*blocks, strict=True):
                names = [name for name in ("linear", "res_connection") if hasattr(layer[0], name)]
                parts = [[block.get_submodule(name) for name in names] for block in layer]
                weights = [torch.cat([part.weight for part in of_head]).T for of_head in parts]
                biases = [torch.cat([part.bias for part in of_head])[None] for of_head in parts]
                layers.append((torch.stack(weights).contiguous(), torch.stack(biases)))
            self._stack = (state, layers)
        return self._stack[1]
