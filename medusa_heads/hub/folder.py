"""The files of a checkpoint folder that may be published or copied: its own, and no others'.

A folder that came from somewhere may hold links to private files of this machine. What is read
through one of them would be published under a checkpoint's name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

MAX_REPORT_BYTES = 64 << 20  # of a text or picture; ours take less than one MiB
_PNG = b"\x89PNG"


def own_files(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Those of the names that are there, with their paths. Raises ValueError: one is a link out of
    the folder, no regular file, a picture that is none, or far larger than a report can be."""
    found = {name: own_file(folder, name) for name in names}
    return {name: path for name, path in found.items() if path is not None}


def own_file(folder: Path, name: str) -> Path | None:
    """The path of a file in the folder; None where there is none. Raises ValueError: as
    `own_files`."""
    path = folder / name
    if not os.path.lexists(path):
        return None
    check_inside(folder, path)
    if not path.is_file():
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


def check_inside(folder: Path, path: Path) -> None:
    """Raises ValueError where a file of the folder is a link out of it."""
    # Of the hub's cache, files lie in `blobs` beside the folder.
    real = folder.resolve()
    blobs = real.parent.parent / "blobs"
    of_hub = real.parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink()
    # Path.resolve() raises RuntimeError where a link leads to itself.
    led = Path(os.path.realpath(path))
    if not any(led.is_relative_to(place) for place in (real, blobs)[: 1 + of_hub]):
        raise ValueError(
            f"{str(path)!r} leads out of the checkpoint folder: put the file itself in its place, "
            "or remove it"
        )
