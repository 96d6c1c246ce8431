"""Whether results can be written somewhere, asked before they are made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from medusa_heads.files import check_folder, replace_file


def test_a_folder_that_can_be_written_to_is_not_made_yet(tmp_path: Path) -> None:
    check_folder(tmp_path)
    check_folder(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


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
