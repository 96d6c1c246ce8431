"""A layer of the heads' own over the text so far: attention, then a gated MLP.

Sources: the prefix attention of Hydra++ (Ankner et al. 2024, arXiv:2402.05109, section 4.2). It
also reads the embedding of the token that follows each position, as EAGLE does (Li et al. 2024,
arXiv:2401.15077): when heads draft from h_t, token t + 1 is already known.

Shapes: B batch, T tokens, P positions that are read from, S positions held, A attention heads, E
their width, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_heads.decoder_shape import usual_heads
from medusa_heads.heads.near import NearLinear

ROPE_BASE = 10_000.0

QUERY, KEYS_AND_VALUES, ALL = slice(0, 1), slice(1, 3), slice(0, 3)
"""What the layer projects its input to."""


class PrefixLayer(nn.Module):
    """What heads read of a text at each of its positions: what the layer makes of h_t and the
    embedding of token t + 1, by pre-norm attention with rotary positions and a SwiGLU of twice the
    width. The identity on h_t while it is fresh."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.num_attention_heads = usual_heads(hidden_size, "prefix_attention needs")
        self.attention_norm = nn.RMSNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.attention_out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden_size)
        self.gate_up = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.token = nn.Linear(hidden_size, hidden_size, bias=False)
        self._cos_sin = (torch.empty(0),)  # in a tuple, and so no buffer
        for zeroed in (self.attention_out, self.down, self.token):
            nn.init.zeros_(zeroed.weight)

    @torch.no_grad()
    def attend_as(self, attention_3AED: Tensor) -> None:
        """Take queries, keys and values of inputs that are normed without weights."""
        self.query_key_value.weight.copy_(attention_3AED.flatten(0, 2))
        self.attention_norm.weight.fill_(1.0)

    @property
    def dtype(self) -> torch.dtype:
        return self.down.weight.dtype

    @property
    def held_per_token(self) -> int:
        """Numbers that keys and values of one position are."""
        return 2 * len(self.down.weight)

    def project(
        self, x_BTD: Tensor, positions_BT: Tensor, end: int, parts: slice = ALL
    ) -> list[Tensor]:
        """Queries, keys and values of an input, or some of them, each [B, A, T, E]; all positions
        lie before `end`."""
        width = x_BTD.shape[-1]
        linear, start, stop = self.query_key_value, parts.start * width, parts.stop * width
        normed_BTD = self.attention_norm(x_BTD)
        if isinstance(linear, NearLinear):
            projected = linear.rows(normed_BTD, start, stop).to(self.dtype)
        else:
            projected = F.linear(normed_BTD, linear.weight[start:stop])
        heads, values = self.num_attention_heads, ALL.stop - 1 - parts.start
        parts_BTNAE = projected.unflatten(-1, (-1, heads, width // heads))
        # Together, and in few calls: while decoding, these cost more than sums.
        turning = parts_BTNAE[:, :, :values]
        cos, sin = self._rotary(end)[positions_BT].unbind(2)
        turned = torch.addcmul(turning * cos, turning.roll(width // heads // 2, -1), sin)
        split = (*turned.unbind(2), *parts_BTNAE[:, :, values:].unbind(2))
        return [part_BTAE.transpose(1, 2) for part_BTAE in split]

    def finish(self, x_BTD: Tensor, mixed_BATE: Tensor) -> Tensor:
        """The layer's output [B, T, D] from its input and what attention mixed."""
        x_BTD = x_BTD + self.attention_out(mixed_BATE.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(F.silu(gate) * up)

    def _rotary(self, end: int) -> Tensor:
        """Cosines and sines by position [S, 2, 1, 1, E], made anew when a text grows beyond them.
        Times the ones, and with its halves exchanged times the others, x is turned by its position
        (Su et al. 2021, arXiv:2104.09864)."""
        weight, (cos_sin,) = self.down.weight, self._cos_sin
        if len(cos_sin) < end or cos_sin.device != weight.device or cos_sin.dtype != weight.dtype:
            half = len(weight) // self.num_attention_heads // 2
            steps_E = torch.arange(half, device=weight.device, dtype=torch.float32) / half
            positions_S = torch.arange(max(2 * end, 512), device=weight.device)
            angles_SE = positions_S[:, None] * ROPE_BASE**-steps_E
            cos, sin = angles_SE.cos(), angles_SE.sin()
            halves = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], dim=1)
            self._cos_sin = (halves[:, :, None, None].to(weight.dtype),)
        return self._cos_sin[0]

    def read(self, hidden_BTD: Tensor, following_BTD: Tensor) -> Tensor:
        """The layer's input [B, T, D]: hidden states, and the embeddings of the tokens behind."""
        return hidden_BTD.to(self.dtype) + self.token(following_BTD.to(self.dtype))

    def forward(
        self, hidden_BTD: Tensor, following_BTD: Tensor, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Whole texts at once, each position seeing itself and what came before: [B, T, D]. Packed
        documents do not see each other."""
        x_BTD = self.read(hidden_BTD, following_BTD)
        return self.finish(x_BTD, self.mix(x_BTD, position_ids_BT))

    def mix(self, x_BTD: Tensor, position_ids_BT: Tensor | None = None) -> Tensor:
        """What attention mixes of the inputs of whole texts, [B, A, T, E]."""
        end, mask = x_BTD.shape[1], None
        slots_T = torch.arange(end, device=x_BTD.device)
        if position_ids_BT is None:
            position_ids_BT = slots_T.expand(len(x_BTD), -1)
        else:
            document_BT = (position_ids_BT == 0).cumsum(dim=1)
            same_BTT = document_BT[:, :, None] == document_BT[:, None]
            mask = (same_BTT & (slots_T[:, None] >= slots_T))[:, None]
        query, keys, values = self.project(x_BTD, position_ids_BT, end)
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None
        )

    def keys_and_values(self, x_BTD: Tensor, positions_BT: Tensor, end: int) -> Tensor:
        """From what was read at some positions, [2, B, A, T, E]."""
        return torch.stack(self.project(x_BTD, positions_BT, end, KEYS_AND_VALUES))

    def look(
        self,
        x_BPD: Tensor,
        positions_BP: Tensor,
        end: int,
        held_LBASE: Tensor,
        visible_BPS: Tensor | None = None,
    ) -> Tensor:
        """The output [B, P, D] at some positions from `keys_and_values` of the text, of which each
        sees what is visible to it; by default all."""
        (query_BAPE,) = self.project(x_BPD, positions_BP, end, QUERY)
        mask = None if visible_BPS is None else visible_BPS[:, None]
        keys, values = held_LBASE
        if query_BAPE.shape[2] == 1 and keys.is_cpu and keys.dtype == torch.bfloat16:
            mixed_BAPE = _attention_of_one(query_BAPE, keys, values, mask)
        else:
            mixed_BAPE = F.scaled_dot_product_attention(query_BAPE, keys, values, attn_mask=mask)
        return self.finish(x_BPD, mixed_BAPE)


def _attention_of_one(
    query_BA1E: Tensor, keys_BASE: Tensor, values_BASE: Tensor, mask_B11S: Tensor | None
) -> Tensor:
    """Attention of a single query. torch's own on a CPU takes twice as long where keys are bf16."""
    scores_BAS = (keys_BASE * (query_BA1E * query_BA1E.shape[-1] ** -0.5)).sum(dim=-1)
    if mask_B11S is not None:
        scores_BAS = scores_BAS.masked_fill(~mask_B11S[:, :, 0], -torch.inf)
    return (scores_BAS.softmax(dim=-1)[..., None] * values_BASE).sum(dim=2, keepdim=True)
