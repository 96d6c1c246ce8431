"""The files of a checkpoint folder that may be published or copied: its own, and no others'.

A folder that came from somewhere may hold links to private files of this machine. What is read
through one of them would be published under a checkpoint's name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

MAX_REPORT_BYTES = 64 << 20  # of a text or picture; ours take less than one MiB
_PNG = b"\x89PNG"


def own_files(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Those of the names that are there, with their paths.

    Raises:
        ValueError: one is a link out of the folder, no regular file, a picture that is none, or far
            larger than a report can be.
    """
    found = {}
    for name in names:
        if (path := own_file(folder, name)) is not None:
            found[name] = path
    return found


def own_file(folder: Path, name: str) -> Path | None:
    """The path of a file in the folder; None where there is none.

    Raises:
        ValueError: as `own_files`.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    real = path.resolve()
    if not any(real.is_relative_to(place) for place in _places(folder)):
        raise ValueError(
            f"{str(path)!r} leads out of the checkpoint folder: put the file itself in its place, "
            "or remove it"
        )
    if not path.exists() or not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"expected a file at {str(path)!r}, found something else: remove it")
    if name.endswith((".json", ".md", ".png")) and path.stat().st_size > MAX_REPORT_BYTES:
        raise ValueError(
            f"{str(path)!r} is larger than a report can be ({path.stat().st_size:,} bytes): it is "
            "damaged, or something else"
        )
    if name.endswith(".png"):
        with path.open("rb") as file:
            if file.read(len(_PNG)) != _PNG:
                raise ValueError(f"expected a picture at {str(path)!r}, found something else")
    return path


def _places(folder: Path) -> list[Path]:
    """Where a folder's files may lie: in it, and those of the hub's cache in `blobs` beside it."""
    real = folder.resolve()
    blobs = real.parent.parent / "blobs"
    of_hub = real.parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink()
    return [real, blobs] if of_hub else [real]
