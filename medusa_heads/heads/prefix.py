"""Layers of the heads' own over the text so far: attention, then a gated MLP.

Sources: the prefix attention of Hydra++ (Ankner et al. 2024, arXiv:2402.05109, section 4.2). It
also reads the embedding of the token that follows each position, as EAGLE does (Li et al. 2024,
arXiv:2401.15077): when heads draft from h_t, token t + 1 is already known. A block of queries over
keys and values that are projected from the target's states is DFlash's (arXiv:2602.06036).

Shapes: B batch, T tokens, P positions that are read from, S positions held, L layers, A attention
heads, E their width, D hidden, Q queries of a position, O = Q * D.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROPE_BASE = 10_000.0

QUERY, KEYS_AND_VALUES, ALL = slice(0, 1), slice(1, 3), slice(0, 3)
"""What a layer projects its input to."""

AT_ONCE = 1 << 27
"""Numbers that blocks keep for the backward pass; of longer texts they are computed again."""

_SPREAD = 0.5  # of fresh queries, beside hidden states: alike, they would be slow to part

_AGAIN: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


class AttentionLayer(nn.Module):
    """Pre-norm attention with rotary positions and a SwiGLU of twice the width; the identity while
    it is fresh."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.num_attention_heads = _attention_heads(hidden_size)
        self.attention_norm = nn.RMSNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.attention_out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden_size)
        self.gate_up = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self._cos_sin = (torch.empty(0),)  # in a tuple, and so no buffer
        for zeroed in (self.attention_out, self.down):
            nn.init.zeros_(zeroed.weight)

    @property
    def dtype(self) -> torch.dtype:
        """What the layer computes in."""
        return self.down.weight.dtype

    def project(
        self, x_BTD: Tensor, positions_BT: Tensor, end: int, parts: slice = ALL
    ) -> list[Tensor]:
        """Queries, keys and values of an input, or some of them, each [B, A, T, E]; all positions
        lie before `end`."""
        width = x_BTD.shape[-1]
        weight = self.query_key_value.weight[parts.start * width : parts.stop * width]
        projected = F.linear(self.attention_norm(x_BTD), weight)
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
        out_BTD: Tensor = x_BTD + self.down(F.silu(gate) * up)
        return out_BTD

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


class PrefixLayer(AttentionLayer):
    """What heads read of a text at each of its positions: what the layer makes of h_t and the
    embedding of token t + 1, the identity on h_t while it is fresh.

    With `num_queries`, a block of so many at each position: h_t and the embedding with a learnt
    vector each, at positions t + 1, t + 2, ... They see the text up to t, and each other, and leave
    the vector behind at the end, so that fresh ones are the identity as well. All
    `num_layers` of a block project keys and values from the text as the first one reads it.
    """

    def __init__(
        self, hidden_size: int, num_queries: int | None = None, num_layers: int = 1
    ) -> None:
        super().__init__(hidden_size)
        self.token = nn.Linear(hidden_size, hidden_size, bias=False)
        nn.init.zeros_(self.token.weight)
        self.queries = None
        if num_queries is not None:
            self.queries = nn.Parameter(torch.randn(num_queries, hidden_size) * _SPREAD)
        self.further = nn.ModuleList(AttentionLayer(hidden_size) for _ in range(num_layers - 1))

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The first, which this is, and what lies behind it."""
        return (self, *self.further)

    def read(self, hidden_BTD: Tensor, following_BTD: Tensor) -> Tensor:
        """The layer's input [B, T, D]: hidden states, and the embeddings of the tokens behind."""
        read_BTD: Tensor = hidden_BTD.to(self.dtype) + self.token(following_BTD.to(self.dtype))
        return read_BTD

    def forward(
        self, hidden_BTD: Tensor, following_BTD: Tensor, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Whole texts at once, each position seeing itself and what came before: [B, T, O]. Packed
        documents do not see each other."""
        x_BTD, end = self.read(hidden_BTD, following_BTD), hidden_BTD.shape[1]
        slots_T, document_BT = torch.arange(end, device=x_BTD.device), None
        if position_ids_BT is None:
            position_ids_BT = slots_T.expand(len(x_BTD), -1)
        else:
            document_BT = (position_ids_BT == 0).cumsum(dim=1)

        def visible(chunk: slice) -> Tensor:
            seen_BPS = (slots_T[chunk, None] >= slots_T[: chunk.stop])[None]
            if document_BT is None:
                return seen_BPS
            return seen_BPS & (document_BT[:, chunk, None] == document_BT[:, None, : chunk.stop])

        if self.queries is None:
            query, keys, values = self.project(x_BTD, position_ids_BT, end)
            mask = None if document_BT is None else visible(slice(0, end))[:, None]
            mixed_BATE = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=mask is None
            )
            return self.finish(x_BTD, mixed_BATE)
        held_LBASE = self.keys_and_values(x_BTD, position_ids_BT, end)
        of_scores = 4 * self.num_attention_heads * (end + len(self.queries))
        of_position = len(self.queries) * (of_scores + 16 * x_BTD.shape[-1]) * len(self.layers)
        count = max(AT_ONCE // (len(x_BTD) * of_position), 1)
        parts = []
        for start in range(0, end, count):
            chunk = slice(start, min(start + count, end))
            at, held = (
                (x_BTD[:, chunk], position_ids_BT[:, chunk]),
                held_LBASE[..., : chunk.stop, :],
            )
            look: Any = self.look if count >= end else partial(checkpoint, self.look, **_AGAIN)
            parts.append(look(*at, end, held, visible(chunk)))
        return torch.cat(parts, dim=1)

    def keys_and_values(self, x_BTD: Tensor, positions_BT: Tensor, end: int) -> Tensor:
        """Of all layers, [2 * L, B, A, T, E]."""
        projected = (
            layer.project(x_BTD, positions_BT, end, KEYS_AND_VALUES) for layer in self.layers
        )
        return torch.stack([part for pair in projected for part in pair])

    def look(
        self,
        x_BPD: Tensor,
        positions_BP: Tensor,
        end: int,
        held_LBASE: Tensor,
        visible_BPS: Tensor | None = None,
    ) -> Tensor:
        """The output [B, P, O] at some positions from `keys_and_values` of the text, of which each
        sees what is visible to it; by default all."""
        if self.queries is None:
            (query_BAPE,) = self.project(x_BPD, positions_BP, end, QUERY)
            mask = None if visible_BPS is None else visible_BPS[:, None]
            keys, values = held_LBASE
            mixed_BAPE = F.scaled_dot_product_attention(query_BAPE, keys, values, attn_mask=mask)
            return self.finish(x_BPD, mixed_BAPE)
        ahead_Q = 1 + torch.arange(len(self.queries), device=x_BPD.device)
        positions_BO = (positions_BP[:, :, None] + ahead_Q).flatten(1)
        x_BOD = (x_BPD[:, :, None] + self.queries).flatten(1, 2)
        for layer, text in zip(self.layers, held_LBASE.split(2), strict=True):
            own = layer.project(x_BOD, positions_BO, end + len(ahead_Q))
            x_BOD = layer.finish(x_BOD, _of_text_and_block(own, text, len(ahead_Q), visible_BPS))
        return (x_BOD.unflatten(1, (-1, len(ahead_Q))) - self.queries).flatten(2)


def _of_text_and_block(
    own: list[Tensor], text_LBASE: Tensor, queries: int, visible_BPS: Tensor | None
) -> Tensor:
    """What blocks mix [B, A, P * Q, E] by queries, keys and values of their `own`: each query sees
    what its position may see of the text's S keys and values, and those of its own block."""
    text_keys, text_values = text_LBASE
    query, keys, values = (x.unflatten(2, (-1, queries)) for x in own)
    query = query * query.shape[-1] ** -0.5
    scores_BAPQS = (query.flatten(2, 3) @ text_keys.mT).unflatten(2, (-1, queries))
    if visible_BPS is not None:
        scores_BAPQS = scores_BAPQS.masked_fill(~visible_BPS[:, None, :, None], -torch.inf)
    scores = torch.cat([scores_BAPQS, query @ keys.mT], dim=-1)
    shares = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    of_text, of_block = shares.split([text_keys.shape[2], queries], dim=-1)
    return of_text.flatten(2, 3) @ text_values + (of_block @ values).flatten(2, 3)


def _attention_heads(hidden_size: int) -> int:
    """As many heads as make them 64 wide, or the nearest even width that divides."""
    widths = [w for w in range(2, hidden_size + 1, 2) if hidden_size % w == 0]
    if not widths:
        raise ValueError(
            "prefix_attention and kind 'block' need an even hidden size, this target's is "
            f"{hidden_size}"
        )
    return hidden_size // min(widths, key=lambda width: abs(width - 64))
