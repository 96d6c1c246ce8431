"""A transformers Cache whose rows can be kept or dropped by index, in place.

Every layer, sliding-window ones too, holds all rows (the mask holds the window) in buffers that
grow by doubling. Buffers of one shape lie in one stacked tensor, so that keeping the accepted rows
of a tree is one gather and one scatter for all layers at once.

Shapes: G stacked buffers (keys and values of several layers), B batch, H key-value heads, C
capacity in slots, A accepted rows, X head dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from medusa_heads.errors import UnsupportedArchitecture

_INITIAL_SLACK = 256  # slots beyond the prompt before the first growth

# Layers that read another layer's keys and values (Gemma 3n) hold nothing of their own.
_SHARED_LAYER: tuple[type, ...] = tuple(
    kind for kind in (getattr(cache_utils, "DummyLayer", None),) if kind is not None
)
_PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


class RowLayer(DynamicLayer):
    """One layer's keys and values: views into the stacks of its RowCache."""

    is_sliding = False

    def __init__(self, stacks: _Stacks) -> None:
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

    Raises:
        UnsupportedArchitecture: a layer keeps recurrent, convolutional or indexed state, which has
            no rows to keep.
    """

    fixed_capacity: int | None = None  # slots of a cache that cannot grow

    def __init__(self, config: Any) -> None:
        self._stacks = _Stacks()
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


class _Stacks:
    """The stacked buffers. A member is (stack, place in it)."""

    def __init__(self) -> None:
        self.stacks: list[Tensor] = []  # each [G, B, H, C, X]
        self.expected_layers = 0
        self._keys: list[tuple[Any, ...]] = []
        self._used: Counter[int] = Counter()
        self._layers_added = 0
        self.capacity = 0

    def buffer(self, member: tuple[int, int]) -> Tensor:
        stack, place = member
        return self.stacks[stack][place]

    def add(self, keys: Tensor, values: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
        """Places for one more layer. A new stack has room for all layers still to come, since in
        most models they are alike; what stays unused is given back by `trim`."""
        self.capacity = self.capacity or keys.shape[-2] + _INITIAL_SLACK
        remaining = max(self.expected_layers - self._layers_added, 1)
        alike = _signature(keys) == _signature(values)
        found = [self._place(t, remaining * (2 if alike else 1)) for t in (keys, values)]
        self._layers_added += 1
        if self._layers_added == self.expected_layers:
            self.trim()
        return found[0], found[1]

    def _place(self, like: Tensor, room: int) -> tuple[int, int]:
        signature = _signature(like)
        for stack, known in enumerate(self._keys):
            if known == signature and self._used[stack] < self.stacks[stack].shape[0]:
                break
        else:
            stack = len(self.stacks)
            batch, heads, _, width = like.shape
            self.stacks.append(like.new_zeros(room, batch, heads, self.capacity, width))
            self._keys.append(signature)
        place = self._used[stack]
        self._used[stack] += 1
        return stack, place

    def trim(self) -> None:
        """Give back the room that models with unlike layers leave unused."""
        for stack, used in self._used.items():
            if used < self.stacks[stack].shape[0]:
                self.stacks[stack] = self.stacks[stack][:used].clone()

    @torch.inference_mode(False)  # a cache outlives the loop that lets it grow
    def reserve(self, slots: int) -> None:
        if slots <= self.capacity:
            return
        grown = max(slots, 2 * self.capacity)
        for i, stack in enumerate(self.stacks):
            larger = stack.new_zeros(*stack.shape[:3], grown, stack.shape[4])
            larger[:, :, :, : self.capacity] = stack
            self.stacks[i] = larger
        self.capacity = grown

    def move_rows(self, source_BA: Tensor, destination_BA: Tensor) -> None:
        for stack in self.stacks:
            if source_BA.shape[0] == 1:
                # One row: plain index operations are several times faster than a scatter.
                rows = stack.index_select(3, source_BA[0].to(stack.device))
                stack.index_copy_(3, destination_BA[0].to(stack.device), rows)
            else:
                # Whole rows of X numbers by their place in the flattened stack: gather and scatter
                # would read an index for every number, and took 300 times as long on a CPU.
                groups, batch, heads, capacity, width = stack.shape
                first = torch.arange(groups * batch * heads, device=stack.device) * capacity
                first_GBH1 = first.view(groups, batch, heads, 1)
                source = (first_GBH1 + source_BA.to(stack.device)[:, None]).flatten()
                place = (first_GBH1 + destination_BA.to(stack.device)[:, None]).flatten()
                rows = stack.view(-1, width)
                rows.index_copy_(0, place, rows.index_select(0, source))

    @torch.inference_mode(False)
    def select_batch(self, rows: Sequence[int]) -> None:
        for i, stack in enumerate(self.stacks):
            index = torch.tensor(list(rows), device=stack.device)
            self.stacks[i] = stack.index_select(1, index)


def _signature(tensor: Tensor) -> tuple[Any, ...]:
    batch, heads, _, width = tensor.shape
    return batch, heads, width, tensor.dtype, tensor.device
