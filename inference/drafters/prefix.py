"""What heads read of a text as it grows: the target's hidden states, or what a prefix layer or an
eagle3 layer, run along the text, makes of them.

Shapes: B active rows, T tokens, P fresh positions (the most of any row), S positions held, A
attention heads, E their width, D hidden, X columns of hidden states with features, O what heads
read of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.heads import DraftHeads, Eagle3Heads
from medusa_heads.heads.base import After
from medusa_heads.inference.drafters.base import Memory, MemoryOnDevice, unread
from medusa_heads.inference.drafters.eagle3 import Eagle3Text
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState

if TYPE_CHECKING:
    from medusa_heads.inference.engine.device_state import DeviceState


def encoded_hidden(heads: DraftHeads, state: DecodingState) -> Tensor:
    """What the heads read at the last committed position of every active row, [B, O]."""
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
        hidden_BPX, following_BP, counts = unread(state)
        device, longest = hidden_BPX.device, hidden_BPX.shape[1]
        batch_B1 = torch.arange(len(counts), device=device)[:, None]
        hidden_BPD = self._heads.fuse(hidden_BPX)
        following_BPD = self._heads.embed(following_BP)
        lengths_B1 = torch.tensor(self.lengths, device=device)[:, None]
        positions_BP = lengths_B1 + torch.arange(longest, device=device)
        x_BPD, end = self._layer.read(hidden_BPD, following_BPD), max(self.lengths) + longest
        fresh_LBAPE = self._layer.keys_and_values(x_BPD, positions_BP, end)
        held_LBASE = self._write(fresh_LBAPE, positions_BP)
        last_B1 = torch.tensor(counts, device=device)[:, None] - 1
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        used = max(self.lengths)
        visible = None  # where all rows are equally long, they see all that is held
        if min(self.lengths) < used:
            slots_S = torch.arange(used, device=device)
            visible = (slots_S <= lengths_B1 + last_B1)[:, None]
        x_B1D, positions_B1 = x_BPD[batch_B1, last_B1], lengths_B1 + last_B1
        held_LBASE = held_LBASE[:, :, :, :used]
        return self._layer.look(x_B1D, positions_B1, end, held_LBASE, visible)[:, 0]

    def on_device(self, capacity: int) -> PrefixMemoryOnDevice:
        """The same of rows on the device, of positions up to a capacity; empty."""
        return PrefixMemoryOnDevice(self._heads, self.held, capacity)

    @property
    def held(self) -> Tensor:
        """Keys and values of the text, and whatever stands behind it, [L, B, A, S, E]."""
        assert self._held_LBASE is not None
        return self._held_LBASE

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


class PrefixMemoryOnDevice(MemoryOnDevice):
    """The same between steps that are one graph."""

    def advance(self, state: DeviceState) -> Tensor:
        assert self.out_BO is not None
        return self.out_BO

    def follow(self, state: DeviceState, most: int) -> None:
        """Read them at once: the next step would have to allow for those of a larger tree."""
        layer, capacity, device = self._heads.prefix, self._capacity, self._lengths_B.device
        hidden_BPD = self._heads.fuse(state.fresh_BPX[:, :most])
        x_BPD = layer.read(hidden_BPD, self._heads.embed(state.following_BP[:, :most]))
        lengths_B1 = self._lengths_B[:, None]
        positions_BP = lengths_B1 + torch.arange(most, device=device)
        self._write(layer.keys_and_values(x_BPD, positions_BP, capacity), positions_BP)
        last_B1, batch_B1 = state.last_fresh_B1, torch.arange(len(x_BPD), device=device)[:, None]
        x_B1D, positions_B1 = x_BPD[batch_B1, last_B1], lengths_B1 + last_B1
        visible_B1S = (torch.arange(capacity, device=device) <= positions_B1)[:, None]
        out_B1O = layer.look(x_B1D, positions_B1, capacity, self._held_GBASE, visible_B1S)
        self._lengths_B.add_(state.fresh_B)
        self._hand_on(out_B1O[:, 0])
