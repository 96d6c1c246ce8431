"""The commands and calls of docs/hub.md, as they stand there, against a hub on this machine."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from medusa_heads.cli.main import main
from tests.hub.hub_server import LocalHub, log_in

PAGE = (Path(__file__).parents[2] / "docs" / "hub.md").read_text(encoding="utf-8")
TOKEN = "hf_useruseruser"
LANGUAGES = ("bash", "python")


@pytest.fixture(scope="module")
def pictures() -> None:
    """They are drawn: what is pushed is looked at."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub({TOKEN: "user"}) as hub:
        log_in(hub, TOKEN, tmp_path, monkeypatch)
        yield hub


@pytest.mark.slow
def test_the_page_is_true(
    hub: LocalHub,
    speaker: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(speaker / "heads", "runs/demo/heads")
    files = {path.name: path.read_bytes() for path in (speaker / "target").iterdir()}
    hub.upload("user/demo-target", files)
    size = ["--num_prompts", "1", "--max_new_tokens", "4", "--tree", "2", "--dtypes", "float32"]
    size += ["--prompt_length", "8"]
    assert main(["benchmark", "runs/demo/heads", "--report", "runs/demo", *size]) == 0
    (bash_blocks, python) = (re.findall(rf"```{name}\n(.*?)```", PAGE, re.S) for name in LANGUAGES)
    commands = [shlex.split(line) for block in bash_blocks for line in block.splitlines()]
    assert len(commands) == 5
    for program, *arguments in commands:
        assert program == "medusa-heads" and main(arguments) == 0, capsys.readouterr().err
    repository = hub.repositories["user/demo-heads"]
    assert repository.private and b"How fast" in repository.tree("refs/pr/1")["README.md"]
    for block in python:
        exec(block, {})
