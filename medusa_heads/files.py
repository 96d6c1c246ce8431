"""Files that are whole or absent: written in a hidden folder beside their place, then renamed; and
read with doubt."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_STAGING = re.compile(r"\.[0-9a-f]{16}\.part")  # no name that a user would give


@contextmanager
def staging(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A hidden folder in `folder` to write files in, from where `move_in` takes them. It is gone
    when the block ends; and when it begins, so is what killed processes left of theirs. OSError
    where the folder is missing or cannot be written; a full disk is told by its name."""
    remove_leftovers(folder)
    made, lock = _staging_folder(Path(folder))
    try:
        yield made
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            error.filename = os.fspath(folder)  # the system does not say where
        raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def move_in(
    staged: Path, folder: str | os.PathLike[str], names: Iterable[str], *, durable: bool = True
) -> None:
    """Put staged files or folders in their places, in this order. Where they shall be `durable`,
    their bytes are on the disk before the first of them is seen, and their names when this returns;
    else a power cut may leave them empty. Whoever may read new files here may read them. The old
    files stand where it raises OSError."""
    pairs = [(staged / name, Path(folder) / name) for name in names]
    paths = [path for source, _ in pairs for path in (source, *source.rglob("*"))]
    _share(paths, _rights_here(staged))
    for path in paths if durable else ():
        _to_disk(path)
    for source, place in pairs:
        os.replace(source, place)
    for parent in {place.parent for _, place in pairs} if durable else ():
        _to_disk(parent)


def replace_file(
    path: str | os.PathLike[str], content: str | bytes, *, durable: bool = True
) -> None:
    """Write `content` (text as UTF-8) to `path`; a reader sees the old file or the new one. OSError
    where the folder is missing or cannot be written. `durable`: see `move_in`."""
    path = Path(path)
    with staging(path.parent) as made:
        data = content.encode("utf-8") if isinstance(content, str) else content
        (made / path.name).write_bytes(data)
        move_in(made, path.parent, [path.name], durable=durable)


def replace_json(
    path: str | os.PathLike[str], content: Any, *, indent: int = 2, durable: bool = True
) -> None:
    """`replace_file` with plain values, as indented JSON."""
    replace_file(path, json.dumps(content, indent=indent) + "\n", durable=durable)


def remove_leftovers(folder: str | os.PathLike[str]) -> None:
    """Remove what killed processes left in a folder. A living one holds a lock on what is its."""
    for left in Path(folder).glob(".*.part"):
        if _STAGING.fullmatch(left.name):
            with suppress(OSError):  # in use, or another process was quicker
                if (lock := lock_folder(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)


def _staging_folder(folder: Path) -> tuple[Path, int | None]:
    """A new folder, and the lock on it where the file system has locks."""
    while True:
        made = folder / f".{os.urandom(8).hex()}.part"
        made.mkdir()
        try:
            lock = lock_folder(made)
        except (BlockingIOError, FileNotFoundError):
            continue  # taken for a leftover before it was locked
        if made.exists():
            return made, lock
        assert lock is not None
        os.close(lock)


def lock_folder(folder: Path, *, shared: bool = False) -> int | None:
    """A lock that ends with the process that holds it, or when it is closed; None on a file system
    without any. BlockingIOError where another process holds it, unless both are `shared`;
    FileNotFoundError where the folder is gone."""
    try:
        import fcntl
    except ImportError:  # no POSIX system: there, what killed processes leave is not removed
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _rights_here(folder: Path) -> int:
    probe = folder / f".{os.urandom(8).hex()}"
    probe.touch()
    rights = probe.stat().st_mode
    probe.unlink()
    return stat.S_IMODE(rights)


def _share(paths: Iterable[Path], rights: int) -> None:
    """Give files these rights at least: safetensors writes files that their owner alone reads."""
    for path in paths:
        if path.is_file() and not path.is_symlink():
            has = stat.S_IMODE(path.stat().st_mode)
            if has | rights != has:
                path.chmod(has | rights)


def _to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are there to stay."""
    # Windows brings to the disk only what may be written, and a folder is not.
    writable = not path.is_dir() and os.access(path, os.W_OK)
    try:
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    except PermissionError:  # a folder, where the system opens none
        return
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems keep the names of files by themselves
            raise
    finally:
        os.close(descriptor)


def code_sha256(*folders: Path) -> str:
    """Over the sources in some folders of this package, for what hangs on them."""
    digest = hashlib.sha256()
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def expanded(name: str | os.PathLike[str]) -> Path:
    """A path as a user writes it, `~` being their home; ValueError for nobody's home, and for a
    null character, which no path holds."""
    if "\0" in os.fspath(name):
        raise ValueError(f"no path holds a null character, as {os.fspath(name)!r} does: remove it")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(f"no home is known for the path {str(name)!r}: write it out") from error


def at_home(name: str) -> str:
    """A model's name, or its path with the home written out, as no library does; ValueError for
    nobody's home."""
    return str(expanded(name)) if name.startswith("~") else name


def is_path(name: str) -> bool:
    """Whether no hub id looks like this, so that no hub need be asked."""
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1


def check_folder(folder: str | os.PathLike[str], *, chosen_by: str = "") -> None:
    """See beforehand whether files can be written to a folder; nothing is made. ValueError where a
    file stands in its place, or nothing may be written to it; `chosen_by` says what chooses another
    one that the user has not named."""
    another = f"choose another{chosen_by and ', by '}{chosen_by}"
    if not os.fspath(folder):  # as a shell makes of a variable that is not set
        raise ValueError("expected a folder, got an empty name: name one")
    path = expanded(folder).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        raise ValueError(
            f"expected a folder at {str(folder)!r}, found a file at {str(there)!r}: {another}"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"expected a folder to write to at {str(folder)!r}, but nothing may be written to "
            f"{str(there)!r}: {another}"
        )


def refuse_link(folder: str | os.PathLike[str]) -> None:
    """Raises ValueError where a link stands in a folder's place: what is written to it would lie
    elsewhere."""
    if Path(folder).is_symlink():
        raise ValueError(f"expected a folder at {str(folder)!r}, found a link: remove it")


def half_character(text: str) -> int | None:
    """Where a text cannot be written, if so: JSON and command lines spell halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def parse_json(text: str) -> Any:
    """JSON, of whatever somebody has written; JSONDecodeError where it is none, is nested too
    deeply, or holds a number too long to be read."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, 0) from None
    except ValueError:  # Python reads no integer of more than some thousand digits
        raise json.JSONDecodeError("a number is too long", text, 0) from None


def why_closed(error: OSError) -> str:
    """What the system says of a file that it does not open, which may be whole, and what to do."""
    return f"cannot be read ({error.strerror or error}): see whether it is a file you may read"


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON file that holds an object; ValueError where it is missing, unreadable or no such."""
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"expected a JSON file at {str(path)!r}, found none") from None
    except OSError as error:
        raise ValueError(f"{path} {why_closed(error)}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): the file is damaged") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content
