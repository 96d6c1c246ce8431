"""Folders that are written whole, also where an empty one stands already."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from medusa_heads.checkpoint.files import CONFIG_FILE, SIDECAR_FILE, empty_folder, staged
from tests.killed import dies

NAMES = ("a", CONFIG_FILE, "inner/b", SIDECAR_FILE, "z")


def write(folder: Path) -> None:
    with staged(folder) as made:
        for name in NAMES:
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_text(name)


def names(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize("rights", [0o700, 0o2770], ids=oct)
def test_an_empty_folder_is_filled_and_stays_itself(
    rights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    folder.chmod(rights)
    before = folder.stat()
    monkeypatch.chdir(folder)
    write(empty_folder("."))
    assert names(Path()) == sorted(NAMES)  # also for who is in it
    assert folder.stat().st_ino == before.st_ino
    assert stat.S_IMODE(folder.stat().st_mode) == rights
    assert os.listdir(tmp_path) == ["out"]


def test_what_vouches_for_the_others_is_seen_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(os, "replace", lambda source, place: seen.append(Path(place).name))
    write(tmp_path)
    assert seen == ["a", "b", "z", CONFIG_FILE, SIDECAR_FILE]


def test_what_a_killed_process_left_in_it_is_no_content(tmp_path: Path) -> None:
    def work() -> None:
        with staged(tmp_path) as made:
            (made / "a").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    assert dies(work) and len(os.listdir(tmp_path)) == 1
    assert empty_folder(tmp_path) == tmp_path and not os.listdir(tmp_path)


@pytest.mark.parametrize("there", [True, False], ids=["a folder", "nothing yet"])
def test_a_link_stays_one(there: bool, tmp_path: Path) -> None:
    if there:
        (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    write(empty_folder(tmp_path / "out"))
    assert (tmp_path / "out").is_symlink() and names(tmp_path / "disk") == sorted(NAMES)


def test_a_path_that_leads_back_is_the_folder_it_leads_to(tmp_path: Path) -> None:
    back = tmp_path / "sub" / ".." / "out"
    assert empty_folder(back) == tmp_path / "out"
    write(empty_folder(back))
    assert sorted(os.listdir(tmp_path)) == ["out"]
    with pytest.raises(ValueError, match="exists and is not empty"):
        empty_folder(tmp_path / "sub" / "..")


def test_an_empty_folder_may_stand_where_nothing_else_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a disk is mounted."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda place, rights: place != tmp_path)
    write(empty_folder(tmp_path / "out"))
    assert names(tmp_path / "out") == sorted(NAMES)


def test_an_empty_name_is_not_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell makes it of a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="expected a folder, got an empty name"):
        empty_folder("")
