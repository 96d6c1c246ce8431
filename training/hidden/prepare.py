"""Write the target's hidden states of all rows to disk, shard by shard.

What is computed depends on the layout alone, never on what a run before left: shards that are whole
stay, the others are written, each anew from its first batch. Several processes take turns with the
shards. Shapes: B batch, T tokens, P kept positions, X columns.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, send_to_device
from datasets import Dataset
from rich.filesize import decimal
from torch import Tensor
from tqdm import tqdm

from medusa_heads.files import remove_leftovers
from medusa_heads.machine.products import dtype_name
from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.pack import hidden_of
from medusa_heads.training.data.seen import Sight
from medusa_heads.training.hidden.cached_rows import kept_counts, kept_positions, row_name
from medusa_heads.training.hidden.layout import (
    INDEX_FILE,
    SHARD_BYTES,
    CacheError,
    CacheKey,
    Index,
    Layout,
    shard_name,
)
from medusa_heads.training.hidden.sharding import end_together, in_all, is_sharded
from medusa_heads.training.hidden.states import refuse_not_finite
from medusa_heads.training.hidden.store import is_shard, seal, write_shard

logger = logging.getLogger(__name__)


@dataclass
class Part:
    """One dataset whose states are wanted: where, of what, and the order and batches in which
    training meets its rows first."""

    folder: Path
    key: CacheKey
    rows: Dataset
    batch_size: int
    seed: int | None

    def size(self, dtype: torch.dtype) -> int:
        layout = Layout(len(self.rows), 1, 1, None, dtype_name(dtype))
        positions = int(kept_counts(self.rows, self.key.positions).sum())
        return positions * Index(self.key, layout).position_bytes

    def layout(self, dtype: torch.dtype, computed_by: str | None) -> tuple[Layout, Any]:
        """How it will lie there, and the positions of each place."""
        rows, said = len(self.rows), dtype_name(dtype)
        layout = Layout(rows, self.batch_size, rows, self.seed, said, computed_by)
        counts = kept_counts(self.rows, self.key.positions)[layout.order()]
        bytes_of_batch = Index(self.key, layout).position_bytes * counts.mean() * self.batch_size
        batches = max(round(SHARD_BYTES / max(bytes_of_batch, 1)), 1)
        return replace(layout, rows_per_shard=batches * self.batch_size), counts


class Forwards:
    """Who computes hidden states: the target's own forwards, in batches as training has them."""

    computed_by: str | None = None  # what others call themselves
    whole_shards = False  # whether it makes batches itself, of all rows of a shard
    passing_bytes = 0  # what lies on the disk beside while it does, about

    def __init__(self, target: TargetModel, sight: Sight | None = None) -> None:
        self.target, self.sight = target, sight or Sight()

    def of(self, rows: Sequence[dict[str, Any]]) -> Iterator[Tensor]:
        """hidden_TX of each row, on the CPU."""
        batch = send_to_device(self.sight.collate(rows), self.target.device)
        for hidden_TX, row in zip(hidden_of(self.target, batch).cpu(), rows, strict=True):
            yield hidden_TX[: len(row["input_ids"])]

    def forget(self) -> None:
        """Let go of what would make the same rows cheaper the next time."""


def write_parts(
    target: TargetModel, parts: Sequence[Part], *, forwards: Forwards | None = None
) -> None:
    """Write what is not there yet; all processes of the run must call this together. Raises
    ValueError: the disk is too small, the states are not finite, or some are there that something
    else computed; OSError where it became full meanwhile. Shards that are whole by then stay."""
    state, forwards = PartialState(), forwards or Forwards(target)
    found: list[Any] = [None]
    dtype = _run_on_nothing(target).dtype
    if state.is_main_process:
        try:
            found = [[_begin(part, dtype, forwards.computed_by) for part in parts]]
            _check_disk(parts, found[0], forwards.passing_bytes)
        except (ValueError, OSError) as error:
            found = [error]
    broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    for part, missing in zip(parts, found[0], strict=True):
        index = in_all(partial(Index.read, part.folder))
        end_together(_fill(forwards, part, index, missing, state))
        seals = state.is_main_process and (missing or not index.is_whole)
        in_all(partial(seal, part.folder, index) if seals else lambda: None)


def _begin(part: Part, dtype: torch.dtype, computed_by: str | None) -> list[int]:
    """Make the folder and its index where there is none, and remove what cannot be used; the shards
    that are missing."""
    folder = part.folder
    remove_leftovers(folder)
    try:
        index = Index.read(folder, to_its_end=True)
        if index.key != part.key:
            raise CacheError(f"{folder} holds the index of another cache")
        alone = os.listdir(folder) == [INDEX_FILE]
        if alone and index.layout != part.layout(dtype, computed_by)[0]:
            raise CacheError(f"{folder} holds the index of other batches, and no states")
    except CacheError as error:
        if (folder / INDEX_FILE).exists():
            logger.warning("%s: it is written anew", error)
        layout, counts = part.layout(dtype, computed_by)
        index = Index(part.key, layout, starts=np.concatenate([[0], np.cumsum(counts)]))
        index.write(folder)
    missing = []
    for shard in range(index.layout.shards):
        path = folder / shard_name(shard)
        was_there = path.exists()  # asked first: another run may put a whole one there meanwhile
        if is_shard(folder, index, shard):
            continue
        missing.append(shard)
        if was_there:
            logger.warning("%s is not whole, or another cache's: it is written anew", path)
            path.unlink()
    if missing and index.layout.computed_by != computed_by:
        began, now = (
            name or "the target's own forwards" for name in (index.layout.computed_by, computed_by)
        )
        raise ValueError(
            f"the hidden states in {folder} were begun by {began}, and {now} cannot go on with "
            "them: go on as they were begun, or remove the folder"
        )
    return missing


def _check_disk(
    parts: Sequence[Part], missing: Sequence[Sequence[int]], passing_bytes: int
) -> None:
    """Say what is there and what will be written; refuse what does not fit, with so much beside."""
    there = needed = 0
    for part, absent in zip(parts, missing, strict=True):
        index = Index.read(part.folder)
        sizes = [index.shape(shard).end for shard in range(index.layout.shards)]
        new = sum(sizes[shard] for shard in absent)
        needed, there = needed + new, there + sum(sizes) - new
    folder = parts[0].folder.parent
    free = shutil.disk_usage(folder).free
    beside = _others(folder, [part.folder for part in parts])
    if needed and needed + passing_bytes > free:
        raise ValueError(
            f"the hidden states take {decimal(needed)} and {folder} has {decimal(free)} free"
            f"{beside}: give a hidden_cache_dir on a larger disk, or leave hidden_cache off"
        )
    print(
        f"Hidden states: {decimal(there)} in {folder}, {decimal(needed)} to be written "
        f"({decimal(free)} are free){beside}",
        flush=True,
    )


def _others(folder: Path, ours: Sequence[Path]) -> str:
    """What other caches in a folder take: nothing removes them but the user."""
    indices = folder.glob(f"*/{INDEX_FILE}")
    others = [index.parent for index in indices if index.parent not in ours]
    # Without what is hidden: it goes while another run writes there.
    size = sum(path.stat().st_size for other in others for path in other.glob("[!.]*"))
    return f", beside {decimal(size)} of other texts or targets" if others else ""


def _fill(
    forwards: Forwards, part: Part, index: Index, missing: Sequence[int], state: PartialState
) -> Exception | None:
    """Write this process's share of the shards that are missing; returns what failed."""
    places = index.layout.places
    if not missing:
        return None
    order = index.layout.order()
    shares = [missing[rank :: state.num_processes] for rank in range(state.num_processes)]
    mine = shares[state.process_index]
    # By rows: a shard can take a quarter of an hour.
    told = {"desc": "writing", "unit": "row", "disable": not state.is_main_process, "leave": False}
    progress = tqdm(total=sum(len(places(shard)) for shard in mine), **told)
    failed: Exception | None = None
    ran = 0

    def states(shard: int) -> Iterator[tuple[bytes, Tensor]]:
        nonlocal ran
        size = len(places(shard)) if forwards.whole_shards else index.layout.batch_size
        for batch in _batches(places(shard), size):
            ran += 1
            some = part.rows.__getitems__(order[batch].tolist())
            for hidden_TX, row in zip(forwards.of(some), some, strict=True):
                hidden_PX = hidden_TX[torch.from_numpy(kept_positions(row, part.key.positions))]
                refuse_not_finite(hidden_PX)
                yield row_name(row, part.key.positions), hidden_PX
                progress.update()

    try:
        with progress:
            for shard in mine:
                write_shard(part.folder, index, shard, states(shard))
    except (ValueError, OSError) as error:
        failed = error
    if is_sharded(forwards.target):  # which all processes must run equally often
        counts = [
            sum(len(_batches(places(n), index.layout.batch_size)) for n in share)
            for share in shares
        ]
        for _ in range(max(counts) - ran):
            _run_on_nothing(forwards.target)
    return failed


def _run_on_nothing(target: TargetModel) -> Tensor:
    return target.hidden(torch.zeros(1, 1, dtype=torch.long, device=target.device))


def _batches(places: range, size: int) -> list[range]:
    return [places[start : start + size] for start in range(0, len(places), size)]
