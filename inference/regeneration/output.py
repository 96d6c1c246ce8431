"""The dataset on disk, and beside it where it came from."""

from __future__ import annotations

import json
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.files import check_folder, move_in, staging
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
    with staging(folder) as staged:
        result.rows.save_to_disk(str(staged))
        content = masked(record) | {
            "accounting": result.accounting.to_dict(),
            "rows": len(result.rows),
            "versions": {name: metadata.version(name) for name in _PACKAGES}
            | {"python": platform.python_version()},
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
        (staged / RECORD_FILE).write_text(text + "\n", encoding="utf-8")
        # The record says whose the folder is, and so comes first; the state says that the others
        # are there: it goes first, and comes last.
        (folder / _STATE_FILE).unlink(missing_ok=True)
        for old in folder.glob("data-*.arrow"):
            old.unlink()
        order = (RECORD_FILE, "", _STATE_FILE)
        names = [path.name for path in staged.iterdir()]
        move_in(staged, folder, sorted(names, key=lambda n: order.index(n if n in order else "")))
    return folder / RECORD_FILE
