"""What a cache of hidden states belongs to, and the file that says so: index.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from medusa_heads.files import parse_json, replace_file
from medusa_heads.training.hidden.cached_rows import KeptPositions, RowPlan

INDEX_FILE = "index.json"
FORMAT_VERSION = 1
SAFETENSORS_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}


@dataclass(frozen=True)
class CacheKey:
    """What hidden states belong to. A difference in any field means another folder.

    Attributes:
        target_weights_sha256: over every weight, bit for bit.
        target_settings_sha256: over what else the forward hangs on.
        computed_in: dtype of the weights.
        hidden_size: D.
        positions: which ones of a row are kept.
        rows_sha256: over token ids and positions of all rows, in no order.
    """

    target_weights_sha256: str
    target_settings_sha256: str
    computed_in: str
    hidden_size: int
    positions: KeptPositions
    rows_sha256: str

    def name(self) -> str:
        """Of the folder."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


class CacheError(ValueError):
    """A file of the cache cannot be used; the message names it."""


def write_index(folder: Path, key: CacheKey, dtype: torch.dtype, plan: RowPlan) -> None:
    """Say in a folder what the hidden states in it belong to."""
    index = {
        "format_version": FORMAT_VERSION,
        "key": asdict(key),
        "dtype": str(dtype).removeprefix("torch."),
        "rows": plan.rows,
        "kept_rows": len(plan.counts),
        "kept_positions": plan.positions,
    }
    replace_file(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def indexed_dtype(folder: Path, key: CacheKey) -> torch.dtype:
    """dtype of the hidden states in a folder, which must belong to `key`.

    Raises:
        CacheError: they do not, or the index cannot be read.
    """
    path = folder / INDEX_FILE
    try:
        index = parse_json(path.read_text(encoding="utf-8"))
        if index["format_version"] != FORMAT_VERSION or index["key"] != asdict(key):
            raise ValueError("it describes another cache")
        found = getattr(torch, index["dtype"])
        if found not in SAFETENSORS_NAMES:
            raise ValueError(f"hidden states of dtype {index['dtype']!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{path} is no index of hidden states ({error})") from error
    assert isinstance(found, torch.dtype)
    return found
