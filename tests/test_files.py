"""Files are old or new, never half; what of JSON is taken."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from medusa_heads.checkpoint.tensor_file import mapped_tensors
from medusa_heads.files import (
    check_folder,
    expanded,
    move_in,
    parse_json,
    read_json,
    remove_leftovers,
    replace_file,
    staging,
)
from tests.killed import dies


@pytest.fixture(autouse=True)
def durable() -> None:
    """What is written here is really waited for."""


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_file_is_replaced_and_nothing_stands_beside_it(tmp_path: Path) -> None:
    replace_file(tmp_path / "a.txt", "ä")
    assert (tmp_path / "a.txt").read_bytes() == b"\xc3\xa4"
    replace_file(tmp_path / "a.txt", b"new")
    assert (tmp_path / "a.txt").read_bytes() == b"new" and names(tmp_path) == ["a.txt"]
    with pytest.raises(OSError, match="missing"):
        replace_file(tmp_path / "missing" / "a.txt", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """The system says only that there is no room."""
    told = pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'")
    with told, staging(tmp_path), open("/dev/full", "wb", buffering=0) as full:
        full.write(b"more")
    assert names(tmp_path) == []


def test_files_and_folders_are_moved_in_by_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = []
    rename = os.replace

    def replace(source: Path, place: Path) -> None:
        moved.append(place.name)
        rename(source, place)

    monkeypatch.setattr(os, "replace", replace)
    with staging(tmp_path) as made:
        (made / "first").mkdir()
        for name in ("first/a", "b", "last"):
            (made / name).write_text(name)
        move_in(made, tmp_path, ["first", "b", "last"])
    assert moved == ["first", "b", "last"]
    assert names(tmp_path) == ["b", "first", "first/a", "last"]


@pytest.mark.skipif(os.name == "nt", reason="there are no such rights")
@pytest.mark.parametrize("umask, expected", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_whoever_may_read_new_files_may_read_those_moved_in(
    umask: int, expected: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        with staging(tmp_path) as made:
            for place in (made / "alone", made / "inner" / "one"):
                place.parent.mkdir(exist_ok=True)
                place.touch(0o600)
            (made / "program").touch(0o700)
            move_in(made, tmp_path, ["alone", "inner", "program"])
    finally:
        os.umask(before)
    found = [tmp_path / name for name in ("alone", "inner/one", "program")]
    rights = [stat.S_IMODE(path.stat().st_mode) for path in found]
    assert rights == [expected, expected, expected | 0o700]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "inner", "program"]


def test_a_system_that_brings_to_the_disk_only_what_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Windows, which opens no folder either, and has no locks of POSIX."""
    fcntl = pytest.importorskip("fcntl")
    opened, brought = os.open, []

    def opens(path: Path, *how: int) -> int:
        if path.is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *how)

    def bring(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        brought.append(descriptor)

    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "fsync", bring)
    replace_file(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text" and len(brought) == 1


def test_a_file_that_nobody_may_write_is_moved_in(tmp_path: Path) -> None:
    with staging(tmp_path) as made:
        (made / "a").touch(0o444)
        move_in(made, tmp_path, ["a"])
    assert names(tmp_path) == ["a"]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    replace_file(tmp_path / "a", "old")
    with pytest.raises(RuntimeError), staging(tmp_path) as made:
        (made / "a").write_text("half")
        raise RuntimeError
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_of_a_living_one(
    tmp_path: Path,
) -> None:
    assert dies(lambda: replace_file(tmp_path / "a", "half"), renames=0)
    assert len(names(tmp_path)) == 2
    (tmp_path / ".mine.part").mkdir()
    with staging(tmp_path) as made:
        assert names(tmp_path) == sorted([made.name, ".mine.part"])
        (tmp_path / ".mine.part").rmdir()
        replace_file(tmp_path / "a", "of another process")
        remove_leftovers(tmp_path)
        assert names(tmp_path) == [made.name, "a"]


def test_an_empty_name_is_no_folder() -> None:
    with pytest.raises(ValueError, match="expected a folder, got an empty name: name one"):
        check_folder("")


def test_a_folder_that_can_be_written_to_is_not_made_yet(tmp_path: Path) -> None:
    check_folder(tmp_path)
    check_folder(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


def test_a_home_that_nobody_has() -> None:
    assert expanded("~/a") == Path.home() / "a"
    with pytest.raises(ValueError, match="no home is known for the path '~nobody-here/a'"):
        expanded("~nobody-here/a")


@pytest.mark.parametrize("name", ["a\0b", "/a\0b", "~/a\0b"])
def test_a_null_character_is_named(name: str) -> None:
    """Which the system's calls say of no name: "embedded null byte"."""
    for read in (expanded, check_folder):
        with pytest.raises(ValueError, match=r"no path holds a null character, as .*: remove it"):
            read(name)


@pytest.mark.parametrize("name", ["taken", "taken/below"])
def test_a_file_in_the_way(name: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match=r"expected a folder at '.*', found a file at '.*taken'"):
        check_folder(tmp_path / name)


def test_a_folder_without_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "access", lambda place, rights: place != tmp_path)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ValueError, match=r"nothing may be written to '.*': choose another"):
            check_folder(tmp_path / "run")
    finally:
        tmp_path.chmod(0o700)


def test_a_writer_whose_file_is_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, or a process of the same number in another container."""
    rename, path, waiting = os.replace, tmp_path / "file", ["the other's"]

    def rename_late(beside: Path, place: Path) -> None:
        if waiting:
            replace_file(path, waiting.pop())
            assert path.read_text() == "the other's"
        rename(beside, place)

    monkeypatch.setattr(os, "replace", rename_late)
    replace_file(path, "one's own")
    assert path.read_text() == "one's own" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "double quotes"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 5_000, "a number is too long"),
    ],
    ids=["torn", "lists", "objects", "digits"],
)
def test_what_no_parser_reads_is_no_json(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(json.JSONDecodeError, match=why):
        parse_json(text)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json is not valid JSON .*{why}"):
        read_json(tmp_path / "a.json")


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\): see whether it is a"):
        read_json(tmp_path)
    root = os.geteuid() == 0  # who may read everything
    with TemporaryDirectory() as folder:  # others may come as far as there
        os.chmod(folder, 0o755)
        path = Path(folder, "a.json")
        path.touch(0)
        if root:
            os.seteuid(65534)
        try:
            for read in (read_json, mapped_tensors):
                with pytest.raises(ValueError, match=r"a\.json cannot be read \(Permission denied"):
                    read(path)
        finally:
            if root:
                os.seteuid(0)
