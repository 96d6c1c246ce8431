"""Rows that are prepared once, by the first process that asks for them, and found again by others
and by later runs.

Each step has a folder, named by a hash of all that its files hang on: the corpus, the tokenizer and
its template, the settings, this code. Files come in whole, so that a step which was interrupted
goes on from those that are there. `prepared.json` comes last and vouches for them. The time of a
folder is that of its last use: in the default place, what no run has asked for in UNUSED_DAYS is
removed.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from rich.filesize import decimal

from medusa_heads import data
from medusa_heads.checkpoint.provenance import version
from medusa_heads.files import (
    check_folder,
    code_sha256,
    expanded,
    lock_folder,
    move_in,
    read_json,
    replace_json,
    staging,
)

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

INDEX_FILE = "prepared.json"
UNUSED_DAYS = 30

_NAME = re.compile(r"[0-9a-f]{16}")
_DAY = 24 * 60 * 60
_BLOCKS, _BLOCK = 64, 1 << 16  # of a file, spread evenly, and the bytes of each
_used: dict[Path, int] = {}  # locks on what this process reads, the oldest first
_MOST_USED = 64  # far more than a run has
_LIBRARIES = ("datasets", "jinja2", "numpy", "pyarrow", "tokenizers", "transformers", "fastokens")


def prepared_folder(place: str | None, *hangs_on: Any) -> Path:
    """The folder of what hangs on the given values and on the code that prepares, in `place`, by
    default in the cache of `datasets`. ValueError where it cannot be written."""
    from datasets.fingerprint import Hasher

    versions = [version(name) for name in _LIBRARIES]
    code = code_sha256(Path(str(data.__file__)).parent, Path(__file__).parent)
    home = _default_home() if place is None else expanded(place)
    check_folder(home, chosen_by="HF_DATASETS_CACHE" if place is None else "prepared_dir")
    return home / str(Hasher.hash([versions, code, *hangs_on]))


def _default_home() -> Path:
    from datasets import config

    return Path(config.HF_DATASETS_CACHE) / "medusa_heads"


def table_fingerprint(rows: Dataset) -> str:
    """A hash of a table by what it holds in memory, and when its files changed: the fingerprint
    that `datasets` gives it says what was asked of it, and stays where a function of a user's
    module was edited."""
    from datasets.fingerprint import Hasher

    files = [(file["filename"], os.stat(file["filename"])) for file in rows.cache_files]
    changed = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    return str(Hasher.hash([rows._fingerprint, rows.data, rows._indices, changed]))


@contextmanager
def prepared(folder: Path) -> Iterator[bool]:
    """A block that makes the files of a folder, unless they are all there, which it is told; other
    processes that ask wait until it ends. Files that are damaged are removed before, all of them,
    with a warning; those of what a ValueError refuses, afterwards. While this process lives, no
    other removes the folder as unused. Where it lies in the default place, those beside it that are
    unused go now."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.parent == _default_home():
        _remove_unused(folder)
    with _locked(folder):
        if damaged := _damaged(folder):
            logger.warning("%s is damaged: what lies beside it is prepared anew", damaged)
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        _use(folder)
        try:
            yield (folder / INDEX_FILE).exists()
        except ValueError:
            shutil.rmtree(folder)
            raise
        if not (folder / INDEX_FILE).exists():
            replace_json(folder / INDEX_FILE, {"files": _files(folder)})


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        raise ValueError(
            f"no file can be locked in {str(folder.parent)!r} ({error.strerror}), as on some "
            "network drives: let prepared_dir name a folder on another drive"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _use(folder: Path) -> None:
    """Note when a folder was used, and hold it for as long as this process lives."""
    os.utime(folder)
    if (before := _used.pop(folder, None)) is not None:
        os.close(before)
    if len(_used) == _MOST_USED:
        os.close(_used.pop(next(iter(_used))))
    if (held := lock_folder(folder, shared=True)) is not None:
        _used[folder] = held


def _remove_unused(but: Path) -> None:
    """Remove folders beside one that nobody has used for long, and say so. What a process uses is
    locked; where the file system has no locks, or the user may not, all stay."""
    before, count, size = time.time() - UNUSED_DAYS * _DAY, 0, 0
    for lock in but.parent.glob("*.lock"):  # beside all that were prepared, whole or not
        folder = lock.with_suffix("")
        if folder == but or not _NAME.fullmatch(folder.name) or folder.is_symlink():
            continue
        with suppress(OSError, Timeout):
            if folder.stat().st_mtime >= before:
                continue
            with FileLock(lock, timeout=0):
                if (held := lock_folder(folder)) is None:
                    break
                try:
                    if folder.stat().st_mtime < before:
                        freed = sum(path.stat().st_size for path in folder.rglob("*"))
                        shutil.rmtree(folder)
                        count, size = count + 1, size + freed
                finally:
                    os.close(held)
    if count:
        logger.warning(
            "%d folders of rows that no run had used for %d days were removed from %s (%s)",
            count,
            UNUSED_DAYS,
            but.parent,
            decimal(size),
        )


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file, which is seen when it is whole."""
    with staging(path.parent) as made:
        write(made / path.name)
        move_in(made, path.parent, [path.name])


def _damaged(folder: Path) -> Path | None:
    """The first file that is not what the index says; None where all are, or there is no index."""
    index = folder / INDEX_FILE
    if not index.exists():
        return None
    try:
        vouched, found = read_json(index)["files"], _files(folder)
        return next((folder / name for name in vouched if found.get(name) != vouched[name]), None)
    except (OSError, ValueError, LookupError, TypeError):
        return index


def _files(folder: Path) -> dict[str, list[Any]]:
    """Of each file its size, and a hash of blocks of it: of all of them, where it is small."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): [path.stat().st_size, _blocks_sha256(path)]
        for path in files
        if path.name != INDEX_FILE
    }


def _blocks_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    step = max((os.path.getsize(path) - _BLOCK) / (_BLOCKS - 1), _BLOCK)
    with path.open("rb") as file:
        for number in range(_BLOCKS):
            file.seek(round(number * step))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()
