"""Hidden states of a dataset's rows on disk: a folder with an index and shards.

index.json                  what they belong to: target, dtype, positions, rows
NNNNNN-xxxxxxxx.safetensors one tensor [P, D] a row, under the row's name

Shards are renamed into place whole, and each says what it holds: a run that was killed leaves a
cache that is merely not complete, and several processes fill one without knowing of each other.
Shapes: P kept positions of a row, D hidden.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa_heads.files import move_in, parse_json, remove_leftovers, replace_json, staging
from medusa_heads.training.hidden.cached_rows import KeptPositions, RowPlan

logger = logging.getLogger(__name__)

INDEX_FILE = "index.json"
FORMAT_VERSION = 1
SHARD_BYTES = 1 << 28
_SAFETENSORS_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_SHARD = re.compile(r"\d{6}-[0-9a-f]{8}\.safetensors")
_OPEN_SHARDS = 128  # far below what a process may hold open


@dataclass(frozen=True)
class CacheKey:
    """What hidden states belong to: the target's weights, bit for bit; what else its forward hangs
    on; the weights' dtype; their columns; which positions of a row are kept; token ids and
    positions of all rows, in no order; and the layers that features among them are of. A difference
    in any field means another folder."""

    target_weights_sha256: str
    target_settings_sha256: str
    computed_in: str
    hidden_size: int
    positions: KeptPositions
    rows_sha256: str
    features: Sequence[int] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values; without features, those of versions that knew of none."""
        values = asdict(self) | {"features": list(self.features)}
        return {name: value for name, value in values.items() if value != []}

    def name(self) -> str:
        """Of the folder."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:16]


class CacheError(ValueError):
    """A file of the cache cannot be used; the message names it."""


class HiddenCache:
    """The hidden states of one dataset, in a folder of its own: what they belong to, and the rows
    that should be there; of a dtype that by default the index says. `read_only` stops at a file
    that cannot be used, in place of writing its rows again. Raises CacheError: a file cannot be
    used and may not be rewritten, or there is no cache."""

    def __init__(
        self,
        folder: Path,
        key: CacheKey,
        plan: RowPlan,
        dtype: torch.dtype | None = None,
        *,
        read_only: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.folder = folder
        self.key = key
        self.plan = plan
        self.read_only = read_only
        self.shard_bytes = shard_bytes
        self.dtype = dtype or self._indexed_dtype()
        self._shard_of: dict[str, Path] = {}
        self._scanned: set[Path] = set()
        self._checked: set[str] = set()  # rows that are known to be finite
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._opened: OrderedDict[Path, Any] = OrderedDict()
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        # Open files do not travel to the workers of a data loader; those open their own.
        return {**self.__dict__, "_opened": OrderedDict()}

    def __contains__(self, name: str) -> bool:
        return name in self._pending or name in self._shard_of

    def missing(self) -> list[str]:
        """Names of rows that are not there."""
        return [name for name in self.plan.counts if name not in self]

    @property
    def row_bytes(self) -> int:
        """Of one position."""
        return self.key.hidden_size * self.dtype.itemsize

    def write_index(self) -> None:
        """Make the folder, and say in it what the hidden states belong to."""
        self.folder.mkdir(parents=True, exist_ok=True)
        index = {
            "format_version": FORMAT_VERSION,
            "key": self.key.to_dict(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "rows": self.plan.rows,
            "kept_rows": len(self.plan.counts),
            "kept_positions": self.plan.positions,
        }
        replace_json(self.folder / INDEX_FILE, index)

    def _indexed_dtype(self) -> torch.dtype:
        path = self.folder / INDEX_FILE
        try:
            index = parse_json(path.read_text(encoding="utf-8"))
            if index["format_version"] != FORMAT_VERSION or index["key"] != self.key.to_dict():
                raise ValueError("it describes another cache")
            found = {str(dtype): dtype for dtype in _SAFETENSORS_NAMES}.get(
                f"torch.{index['dtype']}"
            )
            if found is None:
                raise ValueError(f"hidden states of dtype {index['dtype']!r}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CacheError(f"{path} is no index of hidden states ({error})") from error
        return found

    def refresh(self) -> None:
        """See the shards that other processes wrote meanwhile."""
        # In the order of their numbers: a row that was written again counts as it was last.
        for path in (path for path in self._shards() if path not in self._scanned):
            self._scanned.add(path)
            try:
                self._scan(path)
            except CacheError as error:
                self._give_up(error)
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all shards."""
        assert not self.read_only
        for path in self._shards():
            path.unlink(missing_ok=True)
        for known in (self._shard_of, self._scanned, self._opened):
            known.clear()

    def remove_leftovers(self) -> None:
        """Remove what killed processes left of shards."""
        remove_leftovers(self.folder)

    def read(self, name: str) -> Tensor | None:
        """A row's hidden states [P, D] on the CPU, mapped, and not to be changed; None if they are
        not there. Raises CacheError where the file cannot be used, and may not be rewritten."""
        if name in self._pending:
            return self._pending[name]
        if name not in self._shard_of:
            return None
        path = self._shard_of[name]
        try:
            hidden_PD: Tensor = self._open(path).get_tensor(name)
            if name not in self._checked and not all_finite(hidden_PD):
                raise CacheError(f"{path} holds hidden states that are not finite (row {name})")
        except CacheError as error:
            del self._shard_of[name]
            self._give_up(error)
            return None
        self._checked.add(name)
        return hidden_PD

    def add(self, name: str, hidden_PD: Tensor) -> None:
        """Keep a row's hidden states on the CPU, to be written once a shard is full."""
        assert not self.read_only and hidden_PD.dtype == self.dtype
        assert hidden_PD.shape == (self.plan.counts[name], self.key.hidden_size)
        self._pending[name] = hidden_PD
        self._pending_bytes += hidden_PD.nbytes
        if self._pending_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait; raises OSError where the disk is full or the folder is gone."""
        if not self._pending:
            return
        number = max((int(path.name[:6]) for path in self._scanned), default=-1) + 1
        path = self.folder / f"{number:06}-{uuid.uuid4().hex[:8]}.safetensors"
        with staging(self.folder) as made:
            shard = made / path.name
            shard.touch()
            mode = shard.stat().st_mode  # safetensors makes files that others cannot read
            try:
                save_file(self._pending, shard, metadata={"cache": self.key.name()})
            except SafetensorError as error:
                raise OSError(f"{path} could not be written: {error}") from error
            shard.chmod(mode)
            move_in(made, self.folder, [path.name])
        self._scanned.add(path)
        self._checked.update(self._pending)
        self._shard_of.update(dict.fromkeys(self._pending, path))
        self._pending, self._pending_bytes = {}, 0

    def _shards(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*") if _SHARD.fullmatch(path.name))

    def _scan(self, path: Path) -> None:
        """Note which rows a shard holds; its tensors are not read."""
        shard = self._open(path)
        if (shard.metadata() or {}).get("cache") != self.key.name():
            raise CacheError(f"{path} belongs to another cache")
        wanted = _SAFETENSORS_NAMES[self.dtype]
        names = list(shard.keys())
        for name in names:
            part = shard.get_slice(name)
            shape = [self.plan.counts.get(name), self.key.hidden_size]
            if part.get_shape() != shape or part.get_dtype() != wanted:
                raise CacheError(
                    f"{path} holds {part.get_dtype()} of shape {part.get_shape()} for the row "
                    f"{name}, expected {wanted} of shape {shape}"
                )
        self._shard_of.update(dict.fromkeys(names, path))

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                self._opened[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CacheError(f"{path} is no whole shard of hidden states ({error})") from error
            if len(self._opened) > _OPEN_SHARDS:
                self._opened.popitem(last=False)
        self._opened.move_to_end(path)
        return self._opened[path]

    def _give_up(self, error: CacheError) -> None:
        if self.read_only:
            raise CacheError(f"{error}: write it again with hidden_cache auto") from error
        logger.warning("%s: its rows are computed again", error)


def all_finite(hidden: Tensor) -> bool:
    """Whether there is no NaN and no infinity: by the sum, which is far cheaper than a look at each
    and which no finite hidden states of a usable target bring to overflow."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return bool(hidden.sum(dtype=wide).isfinite())
