"""The dataset on disk, and beside it where it came from."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.files import check_folder, replace_file
from medusa_heads.masking import masked

if TYPE_CHECKING:
    from medusa_heads.inference.regeneration.regenerate import Regenerated

RECORD_FILE = "regeneration.json"
_STATE_FILE = "state.json"  # what datasets looks for: without it, there is no dataset
_PACKAGES = ("medusa-heads", "torch", "transformers", "datasets", "numpy")


def check_output(folder: Path) -> None:
    """Raises ValueError where a dataset of other origin stands in the folder, or nothing can be
    written to it."""
    check_folder(folder)
    if (folder / _STATE_FILE).exists() and not (folder / RECORD_FILE).exists():
        raise ValueError(
            f"{str(folder)!r} holds a dataset that was not made by regenerate: give another "
            "output_dir"
        )


def write_output(result: Regenerated, folder: Path, record: dict[str, Any]) -> Path:
    """Write rows and record, so that whoever reads meanwhile finds the old dataset, the new one or
    none.

    Args:
        result: rows and accounting.
        folder: receives them.
        record: settings, target and backend, as plain values; versions and time are added.

    Returns:
        The record's file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".dataset-", dir=folder))
    try:
        result.rows.save_to_disk(str(staging))
        (folder / _STATE_FILE).unlink(missing_ok=True)
        for old in folder.glob("data-*.arrow"):
            old.unlink()
        content = masked(record) | {
            "accounting": result.accounting.to_dict(),
            "rows": len(result.rows),
            "versions": {name: metadata.version(name) for name in _PACKAGES}
            | {"python": platform.python_version()},
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        file = folder / RECORD_FILE
        text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
        replace_file(file, text + "\n")
        # The state comes last: it says that the others are there.
        for new in sorted(staging.iterdir(), key=lambda path: path.name == _STATE_FILE):
            os.replace(new, folder / new.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return file
