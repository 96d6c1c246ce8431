"""What heads read of a text as it grows: the target's hidden states, or what a prefix layer or an
eagle3 layer, run along the text, makes of them.

Shapes: B active rows, T tokens, P fresh positions (the most of any row), S positions held,
A attention heads, E their width, G or L keys and values, D hidden, X columns of hidden states with
features, O what heads read of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.heads import DraftHeads, Eagle3Heads
from medusa_heads.heads.base import After
from medusa_heads.heads.eagle3 import Branches
from medusa_heads.inference.drafters.base import Memory, MemoryOnDevice, unread
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.cache import RowCache

if TYPE_CHECKING:
    from medusa_heads.inference.engine.device_state import DeviceState


def encoded_hidden(heads: DraftHeads, state: DecodingState) -> Tensor:
    """What the heads read at the last committed position of every active row, [B, O]."""
    if heads.prefix is None:
        return heads.fuse(state.hidden_BD)
    return _memory(PrefixMemory, heads, state).advance(state)


def following(heads: DraftHeads, state: DecodingState) -> After:
    """What sequential heads say behind the last committed token of every active row."""
    if not isinstance(heads, Eagle3Heads):
        return heads.after_paths(encoded_hidden(heads, state))
    return _memory(Eagle3Text, heads, state).advance(state)


def _memory(kind: Callable[..., Any], heads: DraftHeads, state: DecodingState) -> Any:
    """What the heads keep of these texts."""
    if heads not in state.memories:
        state.memories[heads] = kind(heads, state.rows)
    return state.memories[heads]


class PrefixMemory(Memory):
    """Keys and values of the prefix layer over the committed text of every row. A row's positions
    lie at the left of its slots, without holes; what stands to the right of its length, here
    counted without padding, is never seen and will be written over."""

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
            self._held_LBASE = self._held_LBASE[:, :, :, : self.most_slots][:, kept]
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


class Eagle3Text(Memory):
    """The layer's keys and values of the committed text, and behind them those of the drafts of one
    step, which the next step writes over. Row b's positions lie in slots [0, length_b), without
    padding: `lengths` count the target's hidden states that were read."""

    def __init__(self, heads: Eagle3Heads, rows: Sequence[Row]) -> None:
        super().__init__(rows)
        self.lengths = [0] * len(rows)
        self._heads = heads
        self._cache = RowCache(heads.decoder.midlayer.config)

    def advance(self, state: DecodingState) -> Branches:
        """Take in what was committed since last time; what follows it."""
        kept = self.follow(state.rows)
        if kept is not None:
            self._cache.select_batch(kept)
            self._cache.fit(self.most_slots)
        hidden_BPX, following_BP, counts = unread(state)
        hidden_BPD = self._heads.fuse(hidden_BPX)
        device = hidden_BPD.device
        self._cache.set_length(max(self.lengths))
        lengths_B1 = torch.tensor(self.lengths, device=device)[:, None]
        positions_BP = lengths_B1 + torch.arange(hidden_BPD.shape[1], device=device)
        fresh = self._heads.keys_and_values(hidden_BPD, following_BP, positions_BP)
        self._cache.update(*fresh, 0)
        self.lengths = self._cache.keep_paths([range(count) for count in counts], self.lengths)
        used = max(self.lengths)
        self._cache.set_length(used)
        # The last position of each row is read: it sees itself behind the text, not within it.
        last_B1 = torch.tensor(counts, device=device)[:, None] - 1
        ends_B1 = lengths_B1 + last_B1
        visible_BS = torch.arange(used + 1, device=device) < ends_B1
        visible_BS[:, -1] = True
        batch_B1 = torch.arange(len(counts), device=device)[:, None]
        out_B1D = self._heads.read(
            hidden_BPD[batch_B1, last_B1],
            following_BP[batch_B1, last_B1],
            ends_B1,
            visible_BS[:, None],
            self._cache,
        )
        return Branches(self._heads, self._cache, out_B1D[:, 0], ends_B1[:, 0], visible_BS)

    def on_device(self, capacity: int) -> Eagle3TextOnDevice:
        """The same of rows on the device, of positions up to a capacity; empty."""
        return Eagle3TextOnDevice(self._heads, self.held, capacity, self.beside)

    @property
    def held(self) -> Tensor:
        """Keys and values of the text, and whatever stands behind it, [2, B, A, S, E]."""
        return torch.stack(self._cache.row_layers[0].buffers())

    @property
    def beside(self) -> int:  # type: ignore[override]
        """Slots that the last step took: for what was read last, and the drafts behind it."""
        return self._cache.get_seq_length() - max(self.lengths)


class Eagle3TextOnDevice(MemoryOnDevice):
    """The same between steps that are one graph."""

    def advance(self, state: DeviceState) -> Branches:
        assert self.out_BO is not None
        # The last token of each text stands behind all positions, and drafts behind that.
        drafts, ends_B = _Drafts(self._held_GBASE, self._capacity + 1), self._lengths_B - 1
        return Branches(self._heads, drafts, self.out_BO, ends_B, self._visible(ends_B[:, None]))

    def follow(self, state: DeviceState, most: int) -> None:
        """Read them at once: the next step would have to allow for those of a larger tree."""
        heads, device, lengths_B1 = self._heads, self._lengths_B.device, self._lengths_B[:, None]
        hidden_BPD, following_BP = heads.fuse(state.fresh_BPX[:, :most]), state.following_BP
        positions_BP = lengths_B1 + torch.arange(most, device=device)
        fresh = heads.keys_and_values(hidden_BPD, following_BP[:, :most], positions_BP)
        self._write(torch.stack(fresh), positions_BP)
        last_B1 = state.last_fresh_B1
        batch_B1, ends_B1 = torch.arange(len(last_B1), device=device)[:, None], lengths_B1 + last_B1
        out_B1D = heads.read(
            hidden_BPD[batch_B1, last_B1],
            following_BP[batch_B1, last_B1],
            ends_B1,
            self._visible(ends_B1)[:, None],
            _Drafts(self._held_GBASE, self._capacity),
        )
        self._lengths_B.add_(state.fresh_B)
        self._hand_on(out_B1D[:, 0])

    def _visible(self, ends_B1: Tensor) -> Tensor:
        slots_S = torch.arange(self._capacity + 1, device=ends_B1.device)
        return (slots_S < ends_B1) | (slots_S == self._capacity)


class _Drafts:
    """The cache that drafts of one step are read into: they are written behind all positions."""

    def __init__(self, held_GBASE: Tensor, first: int) -> None:
        self._held_GBASE, self._end = held_GBASE, first

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Append them; returns all there is."""
        start, self._end = self._end, self._end + keys.shape[2]
        self._held_GBASE[:, :, :, start : self._end] = torch.stack([keys, values])
        used_GBASE = self._held_GBASE[:, :, :, : self._end]
        return used_GBASE[0], used_GBASE[1]
