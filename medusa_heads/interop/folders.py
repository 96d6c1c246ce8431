"""Folders that are whole or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from medusa_heads.files import expanded, move_in, remove_leftovers, staging


def check_empty(folder: str | os.PathLike[str]) -> Path:
    """The path of a folder that is to be written, absolute.

    Raises:
        ValueError: something stands there already.
    """
    path = expanded(folder).absolute()
    remove_leftovers(path.parent)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"{str(folder)!r} exists and is not empty: name another folder to write to"
        )
    return path


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, which takes its place when the block ends without an error.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staging(folder.parent) as beside:
        made = beside / folder.name
        made.mkdir()
        yield made
        if folder.exists():
            folder.rmdir()
        move_in(beside, folder.parent, [folder.name])
