"""A layer of the heads' own over the text so far: attention, then a gated MLP.

Source: the prefix attention of Hydra++ (Ankner et al. 2024, arXiv:2402.05109, section 4.2). Here it
also reads the embedding of the token that follows each position, as EAGLE does (Li et al. 2024,
arXiv:2401.15077): when heads draft from h_t, token t + 1 is already known.

Shapes: B batch, T tokens, P earlier tokens, S = P + T, A attention heads, E their width, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_BASE = 10_000.0


class PrefixLayer(nn.Module):
    """Pre-norm attention with rotary positions and a SwiGLU of twice the width; the identity on
    the hidden states while it is fresh."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.num_attention_heads = _attention_heads(hidden_size)
        self.token = nn.Linear(hidden_size, hidden_size, bias=False)
        self.attention_norm = nn.RMSNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.attention_out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden_size)
        self.gate_up = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        for zeroed in (self.token, self.attention_out, self.down):
            nn.init.zeros_(zeroed.weight)

    @property
    def dtype(self) -> torch.dtype:
        """What the layer computes in."""
        return self.token.weight.dtype

    def forward(
        self, hidden_BTD: Tensor, following_BTD: Tensor, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Whole texts at once, each position seeing itself and what came before.

        Args:
            hidden_BTD: the target's hidden states.
            following_BTD: embeddings of the tokens behind them.
            position_ids_BT: of packed documents, which do not see each other.
        """
        tokens = hidden_BTD.shape[1]
        if position_ids_BT is None:
            positions_BT = torch.arange(tokens, device=hidden_BTD.device)[None]
            visible = None
        else:
            positions_BT = position_ids_BT
            document_BT = (position_ids_BT == 0).cumsum(dim=1)
            causal_TT = torch.ones(
                tokens, tokens, dtype=torch.bool, device=hidden_BTD.device
            ).tril()
            visible = ((document_BT[:, :, None] == document_BT[:, None]) & causal_TT)[:, None]
        x_BTD, keys_values = self.keys_values(hidden_BTD, following_BTD, positions_BT)
        return self.attend(x_BTD, positions_BT, keys_values, visible)

    def keys_values(
        self, hidden_BTD: Tensor, following_BTD: Tensor, positions_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer's input [B, T, D], and what later positions will see of these: keys and values
        [2, B, A, T, E]."""
        x_BTD = hidden_BTD + self.token(following_BTD)
        size = x_BTD.shape[-1]
        weight = self.query_key_value.weight[size:]
        keys_BTD, values_BTD = F.linear(self.attention_norm(x_BTD), weight).chunk(2, dim=-1)
        keys_BATE = _rotate(self._split(keys_BTD), positions_BT)
        return x_BTD, torch.stack([keys_BATE, self._split(values_BTD)])

    def attend(
        self,
        x_BTD: Tensor,
        positions_BT: Tensor,
        keys_values_2BASE: Tensor,
        visible: Tensor | None = None,
    ) -> Tensor:
        """The layer's output [B, T, D] at T positions of its input that see S keys and values:
        those that `visible` [B, 1, T, S] says, by default a text's own and earlier ones."""
        weight = self.query_key_value.weight[: x_BTD.shape[-1]]
        query_BATE = _rotate(
            self._split(F.linear(self.attention_norm(x_BTD), weight)), positions_BT
        )
        keys_BASE, values_BASE = keys_values_2BASE
        mixed_BATE = F.scaled_dot_product_attention(
            query_BATE, keys_BASE, values_BASE, attn_mask=visible, is_causal=visible is None
        )
        x_BTD = x_BTD + self.attention_out(mixed_BATE.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x_BTD)).chunk(2, dim=-1)
        out_BTD: Tensor = x_BTD + self.down(F.silu(gate) * up)
        return out_BTD

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)


def _attention_heads(hidden_size: int) -> int:
    """As many heads as make them 64 wide, or the nearest even width that divides."""
    widths = [w for w in range(2, hidden_size + 1, 2) if hidden_size % w == 0]
    if not widths:
        raise ValueError(
            f"prefix_attention needs an even hidden size, this target's is {hidden_size}"
        )
    return hidden_size // min(widths, key=lambda width: abs(width - 64))


def _rotate(x_BATE: Tensor, positions_BT: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864), the halves turned against each other."""
    half = x_BATE.shape[-1] // 2
    steps = torch.arange(half, device=x_BATE.device, dtype=torch.float32) / half
    angles = positions_BT[:, None, :, None].float() * ROPE_BASE**-steps
    cos, sin = angles.cos().to(x_BATE.dtype), angles.sin().to(x_BATE.dtype)
    first, second = x_BATE[..., :half], x_BATE[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
