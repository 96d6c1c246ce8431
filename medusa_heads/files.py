"""Files that are whole or absent: written beside their place, then renamed; and read with doubt."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any


def replace_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`; a reader sees the old file or the new one.

    Raises:
        OSError: the folder is missing or cannot be written; the old file stands.
    """
    path = Path(path)
    # No other writer's, be it a process of the same number in another container.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        beside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def check_folder(folder: str | os.PathLike[str]) -> None:
    """See beforehand whether files can be written to a folder; nothing is made.

    Raises:
        ValueError: a file stands in its place, or it may not be written to.
    """
    path = Path(folder).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        raise ValueError(
            f"expected a folder at {str(folder)!r}, found a file at {str(there)!r}: choose another"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"expected a folder to write to at {str(folder)!r}, but nothing may be written to "
            f"{str(there)!r}: choose another"
        )


def refuse_link(folder: str | os.PathLike[str]) -> None:
    """Raises ValueError where a link stands in a folder's place: what is written to it would lie
    elsewhere."""
    if Path(folder).is_symlink():
        raise ValueError(f"expected a folder at {str(folder)!r}, found a link: remove it")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ValueError: it is missing, unreadable, not JSON, or not an object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"expected a JSON file at {str(path)!r}, found none") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): the file is damaged") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content
