"""Commands that are started with standard streams of other kinds, or with none."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_heads.cli.flags.arguments import run_command
from medusa_heads.cli.verbs import generate


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_characters_that_an_encoding_lacks_are_spelt(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of hours ended where it showed its first row, or named its folder."""
    written = io.BytesIO()
    output = io.TextIOWrapper(written, encoding=encoding)
    monkeypatch.setattr("sys.stdout", output)
    assert run_command(lambda: print("a 你 \udce9")) == 0
    assert written.getvalue() == b"a \\u4f60 \\udce9\n"
    assert output.errors == "strict", "a caller's own stream is left as it was"


def test_a_folder_that_is_not_utf8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="utf-8"))
    assert run_command(lambda: print("Checkpoint: 你\udce9")) == 0
    assert written.getvalue() == "Checkpoint: 你\\udce9\n".encode()


def test_no_standard_streams_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a service starts a program; Python has None in their places."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert run_command(lambda: print(sys.stdout.write(sys.stdin.read()))) == 0
    assert run_command(lambda: [][0 : int("x")]) == 2
    assert sys.stdout is None and sys.stderr is None


def test_a_line_of_another_encoding_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat reads on behind it; Python drops the lines that it has read together."""
    given = io.TextIOWrapper(io.BytesIO(b"first\ncaf\xe9\nlast\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", given)
    lines: list[str] = []
    assert run_command(lambda: lines.extend(input() for _ in range(3))) == 0
    assert lines == ["first", "caf\udce9", "last"]


def test_a_prompt_that_cannot_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert generate.main([str(tmp_path)]) == 2
    assert "the prompt is empty: give --prompt TEXT" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk is full here")
def test_a_full_disk_behind_standard_output_is_told_once() -> None:
    program = (
        "import sys; from medusa_heads.cli.flags.arguments import run_command; "
        "sys.exit(run_command(lambda: print('a line')))"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, env=buffered
        )
    assert done.returncode == 2
    told = b"medusa-heads: error: a file could not be written, is the disk full?"
    assert done.stderr.startswith(told) and done.stderr.count(b"\n") == 1
