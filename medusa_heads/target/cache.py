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
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target.stacks import Stacks

# Layers that read another layer's keys and values (Gemma 3n) hold nothing of their own.
_SHARED_LAYER: tuple[type, ...] = tuple(
    kind for kind in (getattr(cache_utils, "DummyLayer", None),) if kind is not None
)
_PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


class RowLayer(DynamicLayer):
    """One layer's keys and values: views into the stacks of its RowCache."""

    is_sliding = False

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._members: tuple[tuple[int, int], tuple[int, int]] | None = None
        self.length = 0
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        """[B, H, length, X], a view."""
        return self._view(0)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        assert value is None, "rows are written by update()"

    @property
    def values(self) -> Tensor | None:
        """[B, H, length, X], a view."""
        return self._view(1)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        assert value is None, "rows are written by update()"

    def _view(self, which: int) -> Tensor | None:
        if self._members is None:
            return None
        return self._stacks.buffer(self._members[which])[:, :, : self.length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._members = self._stacks.add(key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append rows in place; returns all rows as views."""
        if self._members is None:
            self.lazy_initialization(key_states, value_states)
        assert self._members is not None
        start, end = self.length, self.length + key_states.shape[-2]
        self._stacks.reserve(end)
        views = []
        for member, new_BHTX in zip(self._members, (key_states, value_states), strict=True):
            rows_BHTX = self._stacks.buffer(member)[:, :, :end]
            rows_BHTX[:, :, start:] = new_BHTX
            views.append(rows_BHTX)
        self.length = end
        return views[0], views[1]

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
    """The target's key-value cache.

    Args:
        config: the target's text configuration.
        slots: how many will be asked for at most; 0 if nobody knows.

    Raises:
        UnsupportedArchitecture: a layer keeps recurrent, convolutional or indexed state, which has
            no rows to keep.
    """

    fixed_capacity: int | None = None  # slots of a cache that cannot grow

    def __init__(self, config: Any, slots: int = 0) -> None:
        self._stacks = Stacks()
        self.announce(slots)
        layers: list[Any] = []
        for layer in DynamicCache(config=config).layers:
            kind = type(layer).__name__
            if isinstance(layer, _SHARED_LAYER):
                layers.append(layer)
            elif kind in _PLAIN_LAYERS and isinstance(layer, CacheLayerMixin):
                layers.append(RowLayer(self._stacks))
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

        Raises:
            ValueError: the cache has dropped rows that left a sliding window.
        """
        length = cache.get_seq_length()
        for mine, theirs in zip(self.layers, cache.layers, strict=False):
            if mine not in self.row_layers or not length:
                continue
            keys, values = getattr(theirs, "keys", None), getattr(theirs, "values", None)
            if keys is None or values is None or keys.shape[-2] != length:
                raise ValueError(
                    "the given cache no longer holds every token's row (a sliding window dropped "
                    "some): pass the whole text without a cache, or one that this decoder returned"
                )
            assert isinstance(mine, DynamicLayer)
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
        row, moved to that row's own end.

        Args:
            paths: nodes in order, for each row; none for a row that keeps nothing.
            lengths: slots in use before the tree, by row.

        Returns:
            The lengths afterwards.
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
