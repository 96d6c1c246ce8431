"""The shards of hidden states on disk: one is written whole or not at all, and all are read mapped.

Shapes: P kept positions of a row, D hidden, G layers, X = G * D.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from medusa_heads.files import move_in, staging
from medusa_heads.training.hidden.cached_rows import NAME_BYTES
from medusa_heads.training.hidden.layout import (
    AGAIN,
    INDEX_FILE,
    CacheError,
    CacheKey,
    Index,
    shard_name,
)

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# What each byte of fp8 stands for: on a CPU looked up in half the time in which torch converts it.
_OF_BYTE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
_OPEN_SHARDS = 128  # mapped at once, far below what a process may


def encode(hidden_PX: Tensor, index: Index) -> tuple[Any, Any]:
    """The bytes of states and of their scales, as they lie on disk."""
    scales = np.empty(0, np.uint8)
    hidden_PX = hidden_PX.detach().cpu()
    if index.scale_bytes:
        wide_PGD = hidden_PX.float().unflatten(1, (index.layers, -1))
        scale_PG1 = wide_PGD.abs().amax(dim=2, keepdim=True) / _LARGEST
        scale_PG1 = scale_PG1.where(scale_PG1 > 0, 1.0)
        hidden_PX = (wide_PGD / scale_PG1).flatten(1)
        scales = _bytes(scale_PG1.flatten())
    return _bytes(hidden_PX.to(index.stored)), scales


def decode(states: Any, scales: Any, index: Index) -> Tensor:
    """The same as hidden_PX, which shares memory with the bytes where it can."""
    if not index.scale_bytes:
        stored_PX = torch.from_numpy(states).view(index.stored).view(-1, index.key.hidden_size)
        return stored_PX.to(index.computed)
    scale_PG1 = torch.from_numpy(scales).view(torch.float32).view(-1, index.layers, 1)
    width = index.key.hidden_size // index.layers
    wide_PGD = torch.from_numpy(_OF_BYTE[states]).view(-1, index.layers, width) * scale_PG1
    return wide_PGD.flatten(1).to(index.computed)


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def write_shard(
    folder: Path, index: Index, shard: int, rows: Iterable[tuple[bytes, Tensor]]
) -> None:
    """Write a shard of names of rows and their hidden_PX, by place. OSError where the disk is full,
    or the folder is gone: then there is nothing of it."""
    shape, path = index.shape(shard), shard_name(shard)
    names, checks, all_scales = [], [], []
    with staging(folder) as made:
        with (made / path).open("wb") as file:
            file.seek(shape.states)
            for name, hidden_PX in rows:
                states, scales = encode(hidden_PX, index)
                file.write(states)
                names.append(name)
                checks.append(_check(states, scales))
                all_scales.append(scales)
            assert len(names) == len(index.layout.places(shard)), "a row is missing"
            assert file.tell() <= shape.scales, "more positions than are kept"
            file.seek(shape.scales)
            file.writelines(all_scales)
            file.truncate(shape.end)
            file.seek(0)
            file.write(index.shard_head(shard).ljust(shape.names, b"\0") + b"".join(names))
            file.write(np.array(checks, "<u4").tobytes())
        move_in(made, folder, [path])


def is_shard(folder: Path, index: Index, shard: int) -> bool:
    """Whether there is such a file, of this cache and not cut short."""
    try:
        with (folder / shard_name(shard)).open("rb") as file:
            _head(file, index, shard)
    except (OSError, CacheError):
        return False
    return True


def seal(folder: Path, index: Index) -> None:
    """Write the index of a cache all shards of which are there, which vouches for them. Raises
    CacheError where one is not."""
    rows = index.layout.rows
    names, checks = np.empty(rows, f"S{NAME_BYTES}"), np.empty(rows, "<u4")
    for shard in range(index.layout.shards):
        places, shape = index.layout.places(shard), index.shape(shard)
        with (folder / shard_name(shard)).open("rb") as file:
            head = _head(file, index, shard, shape.states)
        here = slice(places.start, places.stop)
        names[here] = np.frombuffer(head, names.dtype, len(places), shape.names)
        checks[here] = np.frombuffer(head, checks.dtype, len(places), shape.checks)
    index.sealed(names, checks).write(folder)


def _head(file: BinaryIO, index: Index, shard: int, size: int = 0) -> bytes:
    """The first bytes of a shard; CacheError where it is another file than it should be."""
    begin, end = index.shard_head(shard), index.shape(shard).end
    head, found = file.read(max(size, len(begin))), os.fstat(file.fileno()).st_size
    if not head.startswith(begin):
        raise CacheError(f"{file.name} is no shard of this cache: {AGAIN}")
    if found != end:
        raise CacheError(f"{file.name} has {found} bytes, expected {end}: {AGAIN}")
    return head


def _check(states: Any, scales: Any) -> int:
    return zlib.crc32(scales, zlib.crc32(states))


class HiddenCache:
    """The hidden states of one dataset, in a folder of its own, to be read. Opening it reads the
    header of its index, and the names of its files; a shard is opened for the first of its rows
    that is asked for. Raises CacheError: the cache is damaged, not complete, or another's."""

    def __init__(self, folder: Path, key: CacheKey) -> None:
        self.folder, self.key = folder, key
        self.index = Index.read(folder)
        if self.index.key != key:
            raise CacheError(f"{folder / INDEX_FILE} describes another cache: remove the folder")
        wanted = {shard_name(shard) for shard in range(self.index.layout.shards)}
        missing = wanted.difference(os.listdir(folder))
        if missing or not self.index.is_whole:
            raise CacheError(
                f"the hidden states in {folder} are not complete, {len(missing)} of {len(wanted)} "
                "shards are missing: go on writing them with medusa-heads prepare-hidden"
            )
        self._opened: OrderedDict[int, tuple[mmap.mmap, Any]] = OrderedDict()
        self._checked = np.zeros(self.index.layout.rows, bool)  # rows that are known to be sound

    def __getstate__(self) -> Any:
        # Mapped files do not travel to the workers of a data loader; those map their own.
        return self.folder, self.key

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def size(self) -> int:
        """The bytes of all states."""
        return int(self.index.starts[-1]) * self.index.position_bytes

    def read(self, name: bytes) -> Tensor | None:
        """A row's hidden states [P, X] on the CPU, not to be changed; None if they are not there.
        Raises CacheError where the file cannot be used."""
        place = self.index.place_of(name)
        return None if place is None else self.read_place(place, name)

    def read_place(self, place: int, name: bytes | None = None) -> Tensor:
        """The same of the row at a place, where a row of this name should be."""
        index = self.index
        shard = place // index.layout.rows_per_shard
        shape, content = index.shape(shard), self._open(shard)
        first, *span = index.starts[[index.layout.places(shard).start, place, place + 1]].tolist()
        begin, end = (position - first for position in span)
        width = index.key.hidden_size * index.stored.itemsize
        states = content[shape.states + begin * width : shape.states + end * width]
        scales = content[shape.scales + begin * index.scale_bytes :][
            : (end - begin) * index.scale_bytes
        ]
        if not self._checked[place]:
            named = shape.names + NAME_BYTES * (place - index.layout.places(shard).start)
            other = name is not None and content[named : named + NAME_BYTES].tobytes() != name
            if other or begin > end or _check(states, scales) != index.checks[place]:
                path = self.folder / shard_name(shard)
                raise CacheError(f"{path} is damaged (row {place}): {AGAIN}")
            self._checked[place] = True
        return decode(states, scales, index)

    def _open(self, shard: int) -> Any:
        path = self.folder / shard_name(shard)
        if shard not in self._opened:
            try:
                with path.open("rb") as file:
                    _head(file, self.index, shard)
                    # Private, and so to be handed on as tensors, which know no read-only memory.
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise CacheError(f"{path} cannot be read ({error}): {AGAIN}") from error
            self._opened[shard] = mapped, np.frombuffer(mapped, np.uint8)
            if len(self._opened) > _OPEN_SHARDS:
                self._opened.popitem(last=False)
        self._opened.move_to_end(shard)
        mapped, content = self._opened[shard]
        if mapped.size() < len(content):  # to read what is no longer there would kill the process
            raise CacheError(f"{path} was cut short while it was read: {AGAIN}")
        return content
