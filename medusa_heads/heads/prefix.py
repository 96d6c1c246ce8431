"""A layer of the heads' own over the text so far: attention, then a gated MLP.

Source: the prefix attention of Hydra++ (Ankner et al. 2024, arXiv:2402.05109, section 4.2). Here it
also reads the embedding of the token that follows each position, as EAGLE does (Li et al. 2024,
arXiv:2401.15077): when heads draft from h_t, token t + 1 is already known.

Shapes: B batch, T tokens, S positions, A attention heads, E their width, D hidden.
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
        self._cos_sin = (torch.empty(0), torch.empty(0))
        for zeroed in (self.token, self.attention_out, self.down):
            nn.init.zeros_(zeroed.weight)

    @property
    def dtype(self) -> torch.dtype:
        """What the layer computes in."""
        return self.token.weight.dtype

    def forward(
        self, hidden_BTD: Tensor, following_BTD: Tensor, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Whole texts at once, each position seeing itself and what came before: hidden states and
        the embeddings of the tokens behind them. Packed documents do not see each other."""
        end, visible = hidden_BTD.shape[1], None
        if position_ids_BT is None:
            position_ids_BT = torch.arange(end, device=hidden_BTD.device)[None]
        else:
            document_BT = (position_ids_BT == 0).cumsum(dim=1)
            visible = (document_BT[:, :, None] == document_BT[:, None]).tril()[:, None]
        x_BTD, query_BATE, keys_BATE, values_BATE = self.read(
            hidden_BTD, following_BTD, position_ids_BT, end
        )
        mixed_BATE = F.scaled_dot_product_attention(
            query_BATE, keys_BATE, values_BATE, attn_mask=visible, is_causal=visible is None
        )
        return self.finish(x_BTD, mixed_BATE)

    def read(
        self, hidden_BTD: Tensor, following_BTD: Tensor, positions_BT: Tensor, end: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The layer's input [B, T, D], and of it the queries, keys and values, each [B, A, T, E];
        all positions lie before `end`."""
        x_BTD = hidden_BTD + self.token(following_BTD)
        projected = self.query_key_value(self.attention_norm(x_BTD))
        query, keys, values = (self._split(part) for part in projected.chunk(3, dim=-1))
        cos, sin = (table[positions_BT][:, None] for table in self._rotary(end))
        return x_BTD, _rotate(query, cos, sin), _rotate(keys, cos, sin), values

    def finish(self, x_BTD: Tensor, mixed_BATE: Tensor) -> Tensor:
        """The layer's output [B, T, D] from its input and what attention mixed."""
        x_BTD = x_BTD + self.attention_out(mixed_BATE.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x_BTD)).chunk(2, dim=-1)
        out_BTD: Tensor = x_BTD + self.down(F.silu(gate) * up)
        return out_BTD

    def _rotary(self, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines by position [S, E / 2], made anew when a text grows beyond them."""
        weight, cos_SE = self.token.weight, self._cos_sin[0]
        if len(cos_SE) < end or cos_SE.device != weight.device or cos_SE.dtype != weight.dtype:
            half = len(weight) // self.num_attention_heads // 2
            steps_E = torch.arange(half, device=weight.device, dtype=torch.float32) / half
            positions_S = torch.arange(max(2 * end, 512), device=weight.device)
            angles_SE = positions_S[:, None] * ROPE_BASE**-steps_E
            self._cos_sin = (angles_SE.cos().to(weight.dtype), angles_SE.sin().to(weight.dtype))
        return self._cos_sin

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


def _rotate(x_BATE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864), the halves turned against each other."""
    first, second = x_BATE.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
