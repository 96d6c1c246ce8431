"""A transformers Cache whose rows can be kept or dropped by index, in place.

Every layer, sliding-window ones too, holds all rows (the mask holds the window). The buffers of all
layers lie in a few stacked tensors (stacks.py).

Shapes: B batch, H key-value heads, A accepted rows, X head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target.stacks import Stacks

_PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


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
        self._members: tuple[tuple[int, int], ...] = ()
        self.length = 0
        super().__init__()

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, C, X], with the room behind them."""
        keys, values = self._members
        return self._stacks.buffer(keys), self._stacks.buffer(values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._members = self._stacks.add(key_states, value_states)
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

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)

    def reset(self) -> None:
        self.length = 0

    # Batch operations work on all layers at once: see RowCache.
    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ValueError("beam search is not supported on this cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ValueError("repeating rows is not supported on this cache: repeat the prompt instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise ValueError("select rows through RowCache.select_batch, for all layers at once")


class RowCache(Cache):
    """The key-value cache of a target with this text configuration, of which so many slots will be
    asked for at most; 0 if nobody knows. Raises UnsupportedArchitecture: a layer keeps recurrent,
    convolutional or indexed state, which has no rows to keep."""

    fixed_capacity: int | None = None  # slots of a cache that cannot grow
    layer_kind = RowLayer

    def __init__(self, config: Any, slots: int = 0, stacks: Stacks | None = None) -> None:
        self._stacks = Stacks() if stacks is None else stacks
        self.announce(slots)
        layers: list[Any] = []
        for layer in DynamicCache(config=config).layers:
            kind = type(layer).__name__
            if kind in _PLAIN_LAYERS:
                layers.append(self.layer_kind(self._stacks))
            elif kind == "DummyLayer":  # reads another layer's keys and values (Gemma 3n)
                layers.append(layer)
            else:
                raise UnsupportedArchitecture(
                    f"{config.model_type} keeps {kind} state in its cache, which has no rows to "
                    "keep or drop"
                )
        super().__init__(layers=layers)
        self._stacks.expected_layers = len(self.row_layers)

    def announce(self, slots: int) -> None:
        """So many slots will be asked for at most from now on; more are still given."""
        self._stacks.announced = slots

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
            mine.update(keys, values)

    def handed_out(self, config: Any) -> RowCache:
        """This cache for a caller to keep: itself, unless it will be used again."""
        return self

    @property
    def row_layers(self) -> list[Any]:
        """The layers that hold rows of their own."""
        return [layer for layer in self.layers if isinstance(layer, RowLayer)]

    def set_length(self, length: int) -> None:
        """Rows from slot `length` on are free to be overwritten."""
        for layer in self.row_layers:
            layer.length = length

    def keep_paths(self, paths: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
        """Of the nodes of a tree, written for all rows behind the longest one, keep a path of each
        row, which may be none, moved to that row's own end.

        Takes the slots in use before the tree, by row, and returns those afterwards.
        """
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
        if source != destination:
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
