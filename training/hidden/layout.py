"""Where hidden states lie on disk: known before the first is computed.

A cache is a folder, named by a hash of its key, with one index and as many shards as it takes:

index.bin      a header in JSON; where each row begins; once all shards are there, the rows' names
               in order, with the place of each, and a checksum of each row
NNNNNN.states  a header; names and checksums of its rows; their states [P, X], row behind row; of
               fp8 the scales [P, G]

All numbers are little-endian. The places of rows are those of their order in the first pass of
training. A shard holds whole batches of it. Shapes: R rows, P kept positions, D hidden, G layers,
X = G * D.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_heads.files import parse_json, replace_file
from medusa_heads.training.arguments.cache import CachedDtype
from medusa_heads.training.hidden.cached_rows import NAME_BYTES, KeptPositions

INDEX_FILE = "index.bin"
FORMAT_VERSION = 3
SHARD_BYTES = 1 << 28  # about
_NAME = f"S{NAME_BYTES}"
_ARRAYS = (("starts", "<i8"), ("names", _NAME), ("places", "<i8"), ("checks", "<u4"))
_INDEX_HEAD = struct.Struct("<8sQI")  # magic, bytes of the JSON, their checksum
_INDEX_MAGIC = b"MHINDEX\0"
_SHARD_HEAD = struct.Struct("<8s16sQ")  # magic, stamp, number
_SHARD_MAGIC = b"MHSTATES"
AGAIN = "remove it, and medusa-heads prepare-hidden writes it again"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPES |= {"float64": torch.float64, "float8_e4m3fn": torch.float8_e4m3fn}


class CacheError(ValueError):
    """A file of the cache cannot be used; the message names it."""


@dataclass(frozen=True)
class CacheKey:
    """What hidden states belong to: the target's weights, bit for bit; what else its forward hangs
    on; the weights' dtype; columns, and layers that features among them are of; which positions of
    a row are kept; the dtype that was asked for on disk; and the rows: how many, of how many
    tokens, and a hash of them all. A difference in any field means another folder."""

    target_weights_sha256: str
    target_settings_sha256: str
    computed_in: str
    hidden_size: int
    features: Sequence[int]
    positions: KeptPositions
    stored_in: CachedDtype
    rows: int
    tokens: int
    rows_sha256: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # JSON has lists

    def name(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Layout:
    """How rows follow one another: in the order that this seed draws, or as they stand; computed in
    batches of so many, from the first of a shard on; of which dtype they were then; and by what, if
    not by the target's own forwards."""

    rows: int
    batch_size: int
    rows_per_shard: int
    seed: int | None
    dtype: str
    computed_by: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        values = asdict(self)
        if self.computed_by is None:
            del values["computed_by"]
        return values

    @property
    def shards(self) -> int:
        return -(-self.rows // self.rows_per_shard)

    def places(self, shard: int) -> range:
        first = shard * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.rows))

    def order(self) -> Any:
        """The row of the dataset at each place, [R]."""
        return np.arange(self.rows) if self.seed is None else drawn_order(self.rows, self.seed)


def drawn_order(rows: int, seed: int) -> Any:
    """The order [R] in which a pass of training draws its rows, where `seed` is the run's and the
    number of the pass, from 0, together: that of accelerate's SeedableRandomSampler."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).numpy()


@dataclass(frozen=True)
class ShardShape:
    """Where the parts of a shard begin, in bytes, and where it ends."""

    checks: int
    states: int
    scales: int
    end: int
    names: int = 64


class Index:
    """The index of a cache: what the states belong to, and by arrays over all places where each row
    begins (`starts`, [R + 1] positions); of a cache that is whole, also the rows' `names`, sorted,
    their `places`, and `checks` by place."""

    starts: Any
    names: Any = None
    places: Any = None
    checks: Any = None
    path = Path(INDEX_FILE)
    mapped: mmap.mmap | None = None

    def __init__(self, key: CacheKey, layout: Layout, **arrays: Any) -> None:
        self.key, self.layout = key, layout
        self.__dict__.update(arrays)

    @property
    def is_whole(self) -> bool:
        """Whether all shards were there when it was written."""
        return self.names is not None

    @property
    def layers(self) -> int:
        """G."""
        return len(self.key.features) + 1

    @property
    def stored(self) -> torch.dtype:
        """Of the states on disk."""
        return DTYPES[self.layout.dtype if self.key.stored_in == "auto" else self.key.stored_in]

    @property
    def computed(self) -> torch.dtype:
        """Of the states as the target computed them, and as they are handed on."""
        return DTYPES[self.layout.dtype]

    @property
    def scale_bytes(self) -> int:
        """Of a position."""
        return 4 * self.layers if self.stored == torch.float8_e4m3fn else 0

    @property
    def position_bytes(self) -> int:
        """All of one."""
        return self.key.hidden_size * self.stored.itemsize + self.scale_bytes

    @cached_property
    def stamp(self) -> bytes:
        """What the shards of this cache begin with: of no other, and of no other layout."""
        said = json.dumps([asdict(self.key), self.layout.to_dict()])
        return hashlib.sha256(said.encode()).digest()[:16]

    def shape(self, shard: int) -> ShardShape:
        """Of a shard. Raises CacheError where the file of the index cannot be used."""
        self.check_size()
        places = self.layout.places(shard)
        positions = int(self.starts[places.stop] - self.starts[places.start])
        checks = ShardShape.names + NAME_BYTES * len(places)
        states = _aligned(checks + 4 * len(places))
        scales = _aligned(states + positions * self.key.hidden_size * self.stored.itemsize)
        return ShardShape(checks, states, scales, scales + positions * self.scale_bytes)

    def shard_head(self, shard: int) -> bytes:
        return _SHARD_HEAD.pack(_SHARD_MAGIC, self.stamp, shard)

    def place_of(self, name: bytes) -> int | None:
        """Of a row, None where it is not there. Raises CacheError where the file cannot be used."""
        self.check_size()
        found = int(np.searchsorted(self.names, np.array(name, _NAME)))
        there = found < len(self.names) and bytes(self.names[found]) == name.rstrip(b"\0")
        place = int(self.places[found]) if there else None
        if place is not None and not 0 <= place < self.layout.rows:
            raise CacheError(f"{self.path} is damaged (place {place}): {AGAIN}")
        return place

    def check_size(self) -> None:
        """Raises CacheError where the file of the arrays was cut since it was opened: to read what
        is mapped and no longer there would kill the process."""
        if self.mapped is not None and self.mapped.size() < len(self.mapped):
            raise CacheError(f"{self.path} was cut short while it was read: {AGAIN}")

    def sealed(self, names: Any, checks: Any) -> Index:
        """The index of a whole cache; both arrays are by place."""
        places = np.argsort(names, kind="stable")
        arrays = {"starts": self.starts, "names": names[places], "places": places, "checks": checks}
        return Index(self.key, self.layout, **arrays)

    def write(self, folder: Path) -> None:
        """Into its folder, which is made; OSError where it cannot be."""
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"format_version": FORMAT_VERSION, "key": asdict(self.key)}
        parts = []
        for name, dtype in _ARRAYS[: None if self.is_whole else 1]:
            content = np.ascontiguousarray(getattr(self, name), dtype).tobytes()
            parts.append(content.ljust(_aligned(len(content)), b"\0"))
        facts |= {"layout": self.layout.to_dict(), "is_whole": self.is_whole}
        facts |= {"arrays_crc32": zlib.crc32(b"".join(parts))}
        said = json.dumps(facts).encode()
        said += b" " * (_aligned(_INDEX_HEAD.size + len(said)) - _INDEX_HEAD.size - len(said))
        parts = [_INDEX_HEAD.pack(_INDEX_MAGIC, len(said), zlib.crc32(said)), said, *parts]
        replace_file(folder / INDEX_FILE, b"".join(parts))

    @classmethod
    def read(cls, folder: Path, *, to_its_end: bool = False) -> Index:
        """Mapped from its file, of which the header alone is read; `to_its_end` the arrays are
        checked too. Raises CacheError where it is no index, or is damaged."""
        path = folder / INDEX_FILE
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            content = np.frombuffer(mapped, np.uint8)
            magic, size, check = _INDEX_HEAD.unpack(content[: _INDEX_HEAD.size].tobytes())
            said = content[_INDEX_HEAD.size : _INDEX_HEAD.size + size].tobytes()
            if magic != _INDEX_MAGIC or len(said) != size or zlib.crc32(said) != check:
                raise ValueError("its header is damaged")
            facts = parse_json(said.decode())
            if facts["format_version"] != FORMAT_VERSION:
                raise ValueError(f"its format is of version {facts['format_version']}")
            layout = Layout(**facts["layout"])
            arrays: dict[str, Any] = {"path": path, "mapped": mapped}
            begin = _INDEX_HEAD.size + size
            for name, dtype in _ARRAYS[: None if facts["is_whole"] else 1]:
                count = layout.rows + (name == "starts")
                end = begin + count * np.dtype(dtype).itemsize
                if end > len(content):
                    raise ValueError("it was cut short")
                arrays[name] = content[begin:end].view(dtype)
                begin = _aligned(end)
            behind = memoryview(mapped)[_INDEX_HEAD.size + size :]
            if to_its_end and zlib.crc32(behind) != facts["arrays_crc32"]:
                raise ValueError("its arrays are damaged")
            return cls(CacheKey(**facts["key"]), layout, **arrays)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise CacheError(f"{path} is no index of hidden states ({error})") from error


def shard_name(shard: int) -> str:
    return f"{shard:06}.states"


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
