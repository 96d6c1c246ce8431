"""Where the hidden states of a batch come from: the target itself, or a cache of what it computed.

Shapes: B batch, T tokens, X columns of hidden states, P kept positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler, get_worker_info

from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.pack import hidden_of
from medusa_heads.training.data.seen import Sight
from medusa_heads.training.hidden.cached_rows import collate_named
from medusa_heads.training.hidden.layout import CacheError, Layout, drawn_order
from medusa_heads.training.hidden.sharding import several_processes
from medusa_heads.training.hidden.store import HiddenCache

Batch = dict[str, Any]

_AT_ONCE = 1 << 16  # rows of an order that are Python's numbers


class HiddenStates:
    """Those of a frozen target, run on every batch that `collate` made: of rows with images, as the
    target is shown them."""

    collate: Callable[[Sequence[Mapping[str, Any]]], Batch]

    def __init__(self, target: TargetModel, sight: Sight | None = None) -> None:
        self.target = target
        self.collate = (sight or Sight()).collate

    def of(self, inputs: Mapping[str, Any]) -> Tensor:
        """hidden_BTX of a batch that `collate` made, on the target's device."""
        return hidden_of(self.target, inputs)

    def of_step(self, inputs: Mapping[str, Any]) -> Tensor:
        """The same in a step that processes take together: where one has none, it goes on with NaN,
        of which the loss ends the run in all."""
        try:
            return self.of(inputs)
        except CacheError:
            if not several_processes():
                raise
            shape = *inputs["input_ids"].shape, self.target.width
            return torch.full(shape, torch.nan, device=self.target.device)

    def order(self, rows: int, seed: int) -> DrawnOrder:
        """The order in which rows are best drawn to train on."""
        return DrawnOrder(rows, seed)


class CachedHiddenStates(HiddenStates):
    """Those that a cache holds, of the rows to train on first; the target never runs. At positions
    that are not kept (see `KeptPositions`) hidden states read back are 0. Those of a row are the
    ones of the batch it was computed in: in bf16 other batches round differently."""

    def __init__(self, target: TargetModel, caches: Sequence[HiddenCache]) -> None:
        super().__init__(target)
        self.caches = caches
        self.collate = partial(_collate_read, caches)

    def of(self, inputs: Mapping[str, Any]) -> Tensor:
        """hidden_BTX, likewise; raises CacheError where a row is not there or is damaged."""
        hidden_BTX: Tensor | None = inputs.get("hidden")
        if hidden_BTX is None:
            hidden_BTX = read_batch(self.caches, inputs["row_names"], inputs["kept"].cpu())
        return hidden_BTX.to(self.target.device)

    def order(self, rows: int, seed: int) -> DrawnOrder:
        """That of a run without a cache, with the rows of each shard brought together."""
        return ShardLocalOrder(self.caches[0].index.layout, seed)


class DrawnOrder(Sampler[int]):
    """The order of a pass of training, as accelerate's SeedableRandomSampler draws it: held as an
    array, where that sampler's list of Python's numbers takes five times the memory."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows, self._seed, self._epoch = rows, seed, 0

    def __len__(self) -> int:
        return self._rows

    def set_epoch(self, epoch: int) -> None:
        """The number of the pass, from 0."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        for start in range(0, len(order), _AT_ONCE):
            yield from order[start : start + _AT_ONCE].tolist()

    def _order(self) -> Any:
        """The row at each place, [R]."""
        return drawn_order(self._rows, self._seed + self._epoch)


class GroupedOrder(DrawnOrder):
    """The order of a pass of rows of like lengths together, as transformers' own sampler draws it,
    but by the number of the pass. That one goes by all that its process drew before: with dropout
    several processes would deal out different orders, and a pass that is resumed had another."""

    def __init__(self, grouped: Any, seed: int) -> None:
        super().__init__(len(grouped), seed)
        self._grouped = grouped

    def _order(self) -> Any:
        self._grouped.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return np.fromiter(self._grouped, np.int64, self._rows)


class ShardLocalOrder(DrawnOrder):
    """The order of a pass of training: as it is drawn without a cache, but the rows of a shard
    follow one another, so that the disk is read in one piece after another. The pass whose order
    the cache was written in has it unchanged."""

    def __init__(self, layout: Layout, seed: int) -> None:
        super().__init__(layout.rows, seed)
        self._layout = layout

    def _order(self) -> Any:
        layout, drawn = self._layout, super()._order()
        shard_of = np.empty(layout.rows, np.int32)  # by row of the dataset
        shard_of[layout.order()] = np.arange(layout.rows) // layout.rows_per_shard
        shards = shard_of[drawn]
        _, met_first = np.unique(shards, return_index=True)
        return drawn[np.argsort(met_first[shards], kind="stable")]


def _collate_read(caches: Sequence[HiddenCache], rows: Sequence[Mapping[str, Any]]) -> Batch:
    """A batch, in a worker of a data loader with its hidden states, read ahead of use."""
    batch = collate_named(rows, caches[0].key.positions)
    # Without workers there is nothing to overlap with, and batches that wait for their turn in a
    # large optimiser step had better be small.
    if get_worker_info() is not None:
        with suppress(CacheError):  # the main process meets it too, and says it in one sentence
            batch["hidden"] = read_batch(caches, batch["row_names"], batch["kept"])
    return batch


def read_batch(caches: Sequence[HiddenCache], names: Sequence[bytes], kept_BT: Tensor) -> Tensor:
    """hidden_BTX on the CPU, 0 where nothing is kept. Raises CacheError where no cache holds a row,
    or one is damaged."""
    index = caches[0].index
    hidden_BTX = torch.zeros(*kept_BT.shape, index.key.hidden_size, dtype=index.computed)
    for b, name in enumerate(names):
        kept_P = kept_BT[b].nonzero().squeeze(1)
        if not (count := len(kept_P)):
            continue
        found = (cache.read(name) for cache in caches)
        hidden_PX = next((hidden for hidden in found if hidden is not None), None)
        if hidden_PX is None:
            raise CacheError(
                f"the hidden states in {' and '.join(str(each.folder) for each in caches)} lack a "
                "row of the text: remove them, and medusa-heads prepare-hidden writes them again"
            )
        assert len(hidden_PX) == count, "the name of a row says which positions are kept"
        first, last = int(kept_P[0]), int(kept_P[-1])
        if last - first + 1 == count:  # in one piece, as most are: a plain copy
            hidden_BTX[b, first : last + 1] = hidden_PX
        else:
            hidden_BTX[b, kept_P] = hidden_PX
    return hidden_BTX


def refuse_not_finite(hidden: Tensor) -> None:
    """Raises ValueError where hidden states of a target hold NaN or an infinity: by their sum,
    which is far cheaper than a look at each, and which no finite ones of a usable target bring to
    overflow."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if not hidden.sum(dtype=wide).isfinite():
        raise ValueError(
            f"the target's hidden states are not finite in {hidden.dtype}: load it in another "
            "dtype, bfloat16 or float32"
        )
