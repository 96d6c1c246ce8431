"""What heads read of a text as it grows: the target's hidden states, or what a prefix layer or an
eagle3 layer, run along the text, makes of them.

Shapes: B active rows, T tokens, P fresh positions (the most of any row), S positions held, A
attention heads, E their width, D hidden, X columns of hidden states with features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.heads import DraftHeads, Eagle3Heads
from medusa_heads.heads.base import After
from medusa_heads.inference.drafters.base import Memory, unread
from medusa_heads.inference.drafters.eagle3 import Eagle3Text
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState


def encoded_hidden(heads: DraftHeads, state: DecodingState) -> Tensor:
    """What the heads read at the last committed position of every active row, [B, D]."""
    if heads.prefix is None:
        return heads.fuse(state.hidden_BD)
    memory = state.memories.get(heads)
    if memory is None:
        memory = state.memories[heads] = PrefixMemory(heads, state.rows)
    return memory.advance(state)


def following(heads: DraftHeads, state: DecodingState) -> After:
    """What sequential heads say behind the last committed token of every active row."""
    if not isinstance(heads, Eagle3Heads):
        return heads.after_paths(encoded_hidden(heads, state))
    memory = state.memories.get(heads)
    if memory is None:
        memory = state.memories[heads] = Eagle3Text(heads, state.rows)
    after: After = memory.advance(state)
    return after


class PrefixMemory(Memory):
    """Keys and values of the prefix layer over the committed text of every row.

    A row's positions lie at the left of its slots, without holes; what stands to the right of its
    length, here counted without padding, is never seen and will be written over.
    """

    def __init__(self, heads: DraftHeads, rows: Sequence[Row]) -> None:
        super().__init__(rows)
        assert heads.prefix is not None
        self._heads, self._layer = heads, heads.prefix
        self.lengths = [0] * len(rows)
        self._held_2BASE: Tensor | None = None

    def advance(self, state: DecodingState) -> Tensor:
        """Take in what was committed since last time; the layer's output at its end, [B, D]."""
        kept = self.follow(state.rows)
        if kept is not None and self._held_2BASE is not None:
            self._held_2BASE = self._held_2BASE[:, kept]
        hidden_BPX, following_BP, counts = unread(state)
        dtype, device, longest = self._layer.dtype, hidden_BPX.device, hidden_BPX.shape[1]
        batch_B1 = torch.arange(len(counts), device=device)[:, None]
        hidden_BPD = self._heads.fuse(hidden_BPX).to(dtype)
        following_BPD = self._heads.embed(following_BP).to(dtype)
        lengths_B1 = torch.tensor(self.lengths, device=device)[:, None]
        positions_BP = lengths_B1 + torch.arange(longest, device=device)
        x_BPD, query_BAPE, keys_BAPE, values_BAPE = self._layer.read(
            hidden_BPD, following_BPD, positions_BP, max(self.lengths) + longest
        )
        held_2BASE = self._write(torch.stack([keys_BAPE, values_BAPE]), positions_BP)
        last_B1 = torch.tensor(counts, device=device)[:, None] - 1
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        used = max(self.lengths)
        visible = None  # where all rows are equally long, they see all that is held
        if min(self.lengths) < used:
            slots_S = torch.arange(used, device=device)
            visible = (slots_S <= lengths_B1 + last_B1)[:, None, None]
        keys_BASE, values_BASE = held_2BASE[:, :, :, :used]
        query_BA1E = query_BAPE[batch_B1, :, last_B1].transpose(1, 2)
        mixed_BA1E = F.scaled_dot_product_attention(
            query_BA1E, keys_BASE, values_BASE, attn_mask=visible
        )
        return self._layer.finish(x_BPD[batch_B1, last_B1], mixed_BA1E)[:, 0]

    def _write(self, fresh_2BAPE: Tensor, positions_BP: Tensor) -> Tensor:
        """All keys and values that are held, the fresh ones among them."""
        start, count = max(self.lengths), fresh_2BAPE.shape[3]
        held = self._held_2BASE
        if held is None or held.shape[3] < start + count:
            two, batch, heads, _, width = fresh_2BAPE.shape
            room = fresh_2BAPE.new_zeros(two, batch, heads, start + count + 256, width)
            if held is not None:
                room[:, :, :, : held.shape[3]] = held
            held = self._held_2BASE = room
        if min(self.lengths) == start:
            held[:, :, :, start : start + count] = fresh_2BAPE
        else:
            # Whole rows at once: an expanded scatter goes element by element on a CPU.
            batch_B1 = torch.arange(held.shape[1], device=held.device)[:, None]
            held[:, batch_B1, :, positions_BP] = fresh_2BAPE.permute(1, 3, 0, 2, 4)
        return held
