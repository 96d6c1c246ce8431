"""What heads with a prefix layer read: that layer, run along the text as it grows.

Shapes: B active rows, T tokens, P fresh positions (the most of any row), S positions held, A
attention heads, E their width, D hidden, X columns of hidden states with features, O what heads
read of a position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_heads.heads import DraftHeads
from medusa_heads.inference.drafters.base import Memory
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState


def encoded_hidden(heads: DraftHeads, state: DecodingState) -> Tensor:
    """What the heads read at the last committed position of every active row, [B, O]."""
    if heads.prefix is None:
        return heads.fuse(state.hidden_BD)
    memory = state.memories.get(heads)
    if memory is None:
        memory = state.memories[heads] = PrefixMemory(heads, state.rows)
    return memory.advance(state)


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
        self._held_LBASE: Tensor | None = None

    def advance(self, state: DecodingState) -> Tensor:
        """Take in what was committed since last time; the layer's output at its end, [B, O]."""
        kept = self.follow(state.rows)
        if kept is not None and self._held_LBASE is not None:
            self._held_LBASE = self._held_LBASE[:, kept]
        hidden_BND, nodes = state.fresh()
        device = hidden_BND.device
        longest = max(len(path) for path in nodes)
        # Rows with less to take in repeat their last position; it is written over next time.
        index = [[*path, *[path[-1]] * (longest - len(path))] for path in nodes]
        batch_B1 = torch.arange(len(nodes), device=device)[:, None]
        hidden_BPX = hidden_BND[batch_B1, torch.tensor(index, device=device)]
        hidden_BPD = self._heads.fuse(hidden_BPX)
        # A row that has ended, and stays in a compiled batch, may have fewer tokens than steps.
        following = [
            (row.last(len(path)) + [0] * longest)[:longest]
            for row, path in zip(state.rows, nodes, strict=True)
        ]
        following_BPD = self._heads.embed(torch.tensor(following, device=device))
        lengths_B1 = torch.tensor(self.lengths, device=device)[:, None]
        positions_BP = lengths_B1 + torch.arange(longest, device=device)
        x_BPD, end = self._layer.read(hidden_BPD, following_BPD), max(self.lengths) + longest
        fresh_LBAPE = self._layer.keys_and_values(x_BPD, positions_BP, end)
        held_LBASE = self._write(fresh_LBAPE, positions_BP)
        last_B1 = torch.tensor([[len(path) - 1] for path in nodes], device=device)
        self.lengths = [n + len(path) for n, path in zip(self.lengths, nodes, strict=True)]
        used = max(self.lengths)
        visible = None  # where all rows are equally long, they see all that is held
        if min(self.lengths) < used:
            slots_S = torch.arange(used, device=device)
            visible = (slots_S <= lengths_B1 + last_B1)[:, None]
        x_B1D, positions_B1 = x_BPD[batch_B1, last_B1], lengths_B1 + last_B1
        held_LBASE = held_LBASE[:, :, :, :used]
        return self._layer.look(x_B1D, positions_B1, end, held_LBASE, visible)[:, 0]

    def _write(self, fresh_LBAPE: Tensor, positions_BP: Tensor) -> Tensor:
        """All keys and values that are held, the fresh ones among them."""
        start, count = max(self.lengths), fresh_LBAPE.shape[3]
        held = self._held_LBASE
        if held is None or held.shape[3] < start + count:
            parts, batch, heads, _, width = fresh_LBAPE.shape
            room = fresh_LBAPE.new_zeros(parts, batch, heads, start + count + 256, width)
            if held is not None:
                room[:, :, :, : held.shape[3]] = held
            held = self._held_LBASE = room
        if min(self.lengths) == start:
            held[:, :, :, start : start + count] = fresh_LBAPE
        else:
            # Whole rows at once: an expanded scatter goes element by element on a CPU.
            batch_B1 = torch.arange(held.shape[1], device=held.device)[:, None]
            held[:, batch_B1, :, positions_BP] = fresh_LBAPE.permute(1, 3, 0, 2, 4)
        return held
