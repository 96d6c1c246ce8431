"""Files that are whole or absent: written beside their place, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`; a reader sees the old file or the new one.

    Raises:
        OSError: the folder is missing or cannot be written; the old file stands.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
