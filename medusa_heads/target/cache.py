"""A transformers Cache whose rows can be kept or dropped by index, in place.

Every layer, sliding-window ones too, holds all rows (the mask holds the window). The buffers of all
layers lie in a few stacked tensors (stacks.py).

Shapes: B batch, H key-value heads, A accepted rows, X head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target.stacks import Member, Stacks

_PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
_INDEXED_LAYERS = ("DynamicIndexedLayer", "MiniMaxM3VLSparseCacheLayer")


def _view(which: int) -> Any:
    """A property of a layer: the rows in use of its keys or values [B, H, length, X]."""

    def read(layer: RowLayer) -> Tensor | None:
        return layer.buffers()[which][:, :, : layer.length] if layer.is_initialized else None

    def write(_: RowLayer, value: Tensor | None) -> None:
        assert value is None, "rows are written by update()"

    return property(read, write)


class RowLayer(DynamicLayer):
    """One layer's keys and values: views into the stacks of its RowCache."""

    is_sliding = False
    keys, values = _view(0), _view(1)

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._members: list[Member] = []
        self.length = 0
        super().__init__()

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, C, X], with the room behind them."""
        return self._stacks.buffer(self._members[0]), self._stacks.buffer(self._members[-1])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        one = value_states is key_states  # and kept once
        self._members = self._stacks.add(*(key_states, value_states)[one:])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append rows in place; returns all rows as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[-2]
        if end > self._stacks.capacity:
            self._stacks.reserve(end)
        keys_BHCX, values_BHCX = self.buffers()
        keys_BHCX[:, :, start:end] = key_states
        values_BHCX[:, :, start:end] = value_states
        self.length = end
        return keys_BHCX[:, :, :end], values_BHCX[:, :, :end]

    def take_over(self, layer: Any) -> None:
        """Copy the rows of a layer of a transformers cache."""
        self.update(layer.keys, layer.values)

    def get_seq_length(self) -> int:
        return self.length

    def set_length(self, length: int) -> None:
        """Rows from that slot on are free to be overwritten."""
        self.length = length

    def members(self) -> list[Member]:
        """Where all that is kept of the tokens read lies."""
        return self._members

    def rows(self) -> list[Tensor]:
        """All that is kept of the tokens read, each [B, H, length, X]."""
        return [self._stacks.buffer(member)[:, :, : self.length] for member in self.members()]

    def crop(self, tokens_to_remove: int) -> None:
        # Versions of transformers differ in what more than 0 means, and whether it may be.
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop() takes how many tokens to remove, as a negative number, got "
                f"{tokens_to_remove}: to keep so many, crop({tokens_to_remove} - get_seq_length())"
            )
        self.set_length(max(self.length + tokens_to_remove, 0))

    def reset(self) -> None:
        self.set_length(0)

    # Batch operations work on all layers at once: see RowCache.
    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ValueError("beam search is not supported on this cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ValueError("repeating rows is not supported on this cache: repeat the prompt instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise ValueError("select rows through RowCache.select_batch, for all layers at once")


class IndexedRowLayer(RowLayer):
    """One layer's keys and values, and the index keys by which its attention chooses which of them
    it reads: rows as well, kept, moved and dropped with them. Shapes: T new tokens, P numberings of
    positions."""

    def __init__(self, stacks: Stacks) -> None:
        super().__init__(stacks)
        self._beside: dict[str, Member] = {}
        self._index_length = 0  # ahead of `length`, or behind it, within a forward

    def _append(self, kind: str, start: int, new_BHTX: Tensor) -> Tensor:
        """Write rows in place; returns all of that kind as a view."""
        if kind not in self._beside:
            self._beside[kind] = self._stacks.add_beside(new_BHTX)
        end = start + new_BHTX.shape[-2]
        if end > self._stacks.capacity:
            self._stacks.reserve(end)
        buffer_BHCX = self._stacks.buffer(self._beside[kind])
        buffer_BHCX[:, :, start:end] = new_BHTX
        return buffer_BHCX[:, :, :end]

    def update_index(self, index_keys_B1TX: Tensor) -> Tensor:
        """Append index keys; returns all of them [B, 1, index length, X]."""
        all_B1LX = self._append("keys", self._index_length, index_keys_B1TX)
        self._index_length = all_B1LX.shape[-2]
        return all_B1LX

    def update_indexer(self, index_keys_BTX: Tensor) -> Tensor:
        """The same without a dimension of heads."""
        return self.update_index(index_keys_BTX[:, None])[:, 0]

    @property
    def idx_keys(self) -> Tensor | None:
        """Index keys of all rows [B, 1, length, X]; None in a layer that uses another's choice."""
        if "keys" not in self._beside:
            return None
        return self._stacks.buffer(self._beside["keys"])[:, :, : self.length]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Where in the text each row stands [P, B, length], where the target keeps that here."""
        if "positions" not in self._beside or not self.length:
            return None
        buffer_BPC1 = self._stacks.buffer(self._beside["positions"])
        return buffer_BPC1[:, :, : self.length, 0].transpose(0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions_PBL: Tensor) -> None:
        new_BPT1 = positions_PBL[:, :, self.length :].transpose(0, 1)[..., None]
        self._append("positions", self.length, new_BPT1)

    def take_over(self, layer: Any) -> None:
        if (positions_PBL := getattr(layer, "indexer_position_ids", None)) is not None:
            self.indexer_position_ids = positions_PBL
        if (keys_BLX := getattr(layer, "indexer_keys", None)) is not None:
            self.update_indexer(keys_BLX)
        if (keys_B1LX := getattr(layer, "idx_keys", None)) is not None:
            self.update_index(keys_B1LX)
        super().take_over(layer)

    def set_length(self, length: int) -> None:
        super().set_length(length)
        self._index_length = length

    def members(self) -> list[Member]:
        return [*super().members(), *(self._beside[kind] for kind in sorted(self._beside))]


class RowCache(Cache):
    """The key-value cache of a target with this text configuration, of which so many slots will be
    asked for at most; 0 if nobody knows. Raises UnsupportedArchitecture: a layer keeps something
    else, which has no rows to keep."""

    fixed_capacity: int | None = None  # slots of a cache that cannot grow
    can_go_back = True  # whether `set_length` may take back what was written
    rows_stand_alone = True  # whether rows of a batch may be kept and dropped each for itself
    layer_kind = RowLayer

    def __init__(self, config: Any, slots: int = 0, stacks: Stacks | None = None) -> None:
        self._stacks = Stacks() if stacks is None else stacks
        self.announce(slots)
        self._model_type = config.model_type
        super().__init__(
            layers=[self.make_layer(layer) for layer in DynamicCache(config=config).layers]
        )
        self._stacks.expected_layers = len(self.row_layers)

    def make_layer(self, layer: Any) -> Any:
        """What stands here for a layer of transformers' own cache."""
        kind = type(layer).__name__
        if kind in _PLAIN_LAYERS:
            return self.layer_kind(self._stacks)
        if kind in _INDEXED_LAYERS:
            return IndexedRowLayer(self._stacks)
        if kind == "DummyLayer":  # reads another layer's keys and values (Gemma 3n)
            return layer
        raise UnsupportedArchitecture(
            f"{self._model_type} keeps {kind} state in its cache, which has no rows to keep or drop"
        )

    def announce(self, slots: int) -> None:
        """So many slots will be asked for at most from now on; more are still given."""
        self._stacks.announced = slots

    def fit(self, slots: int) -> None:
        """Announce so many slots, those in use among them, and let go of what lies behind them."""
        self.announce(slots)
        if self._stacks.capacity > slots:
            self._stacks.cut(slots)

    def take_over(self, cache: Cache) -> None:
        """Copy the rows of a transformers cache into this empty one, so that decoding can go on.
        Raises ValueError: the cache has dropped rows that left a sliding window."""
        length = cache.get_seq_length()
        for mine, theirs in zip(self.layers, cache.layers, strict=False):
            if not isinstance(mine, RowLayer) or not length:
                continue
            keys, values = getattr(theirs, "keys", None), getattr(theirs, "values", None)
            if keys is None or values is None or keys.shape[-2] != length:
                raise ValueError(
                    "the given cache no longer holds every token's row (a sliding window dropped "
                    "some): pass the whole text without a cache, or one that this decoder returned"
                )
            mine.take_over(theirs)

    def handed_out(self, config: Any) -> RowCache:
        """This cache for a caller to keep: itself, unless it will be used again."""
        return self

    @property
    def row_layers(self) -> list[Any]:
        """The layers that hold rows of their own."""
        return [layer for layer in self.layers if isinstance(layer, RowLayer)]

    @property
    def keeps_index(self) -> bool:
        """Whether an indexer chooses which rows are read."""
        return any(isinstance(layer, IndexedRowLayer) for layer in self.layers)

    def set_length(self, length: int) -> None:
        """Rows from slot `length` on are free to be overwritten."""
        for layer in self.row_layers:
            layer.set_length(length)

    def keep_paths(self, paths: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
        """Of the nodes of a tree, written for all rows behind the longest one, keep a path of each
        row, which may be none, moved to that row's own end. Takes the slots in use before the tree,
        by row, and returns those afterwards."""
        written_at = max(lengths)
        longest = max(len(path) for path in paths)
        source, destination = [], []
        for path, length in zip(paths, lengths, strict=True):
            # Shorter paths repeat their last move, which changes nothing; a row without a path has
            # none, and moves a row onto itself.
            moves = [(written_at + node, length + i) for i, node in enumerate(path)]
            moves = moves or [(0, 0)]
            moves += [moves[-1]] * (longest - len(moves))
            source.append([move[0] for move in moves])
            destination.append([move[1] for move in moves])
        if source != destination and self.row_layers:
            device = next(layer.device for layer in self.row_layers)
            self.move_rows(
                torch.tensor(source, device=device), torch.tensor(destination, device=device)
            )
        return [n + len(path) for n, path in zip(lengths, paths, strict=True)]

    def move_rows(self, source_BA: Tensor, destination_BA: Tensor) -> None:
        """Copy, in every layer, row b's slots `source_BA[b]` to `destination_BA[b]`."""
        self._stacks.move_rows(source_BA, destination_BA)

    def select_batch(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        self._stacks.select_batch(rows)

    def join(self, other: RowCache, lengths: Sequence[int]) -> None:
        """Take in the rows of another cache of the target, behind the own ones, so long each."""
        layers = zip(self.row_layers, other.row_layers, strict=True)
        pairs = [zip(mine.members(), theirs.members(), strict=True) for mine, theirs in layers]
        self._stacks.join(other._stacks, [*chain.from_iterable(pairs)], max(lengths))

    @property
    def held_bytes(self) -> int:
        """What all rows take, with the room behind them; 0 before the first forward."""
        return sum(stack.nbytes for stack in self._stacks.stacks)
