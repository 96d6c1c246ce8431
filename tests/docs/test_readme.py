"""Every command and every program in the README runs, in small.

The commands are taken from the README's fenced blocks and run in order, in a folder that looks like
a clone, with flags appended that make them small. A command this file does not know fails the test.
"""

from __future__ import annotations

import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

HEADS = "runs/demo/heads"  # what `make demo` leaves
SMALLER = {
    "train-heads": "--num_prompts 12 --num_eval_prompts 4 --prompt_length 24 "
    "--continuation_length 24 --max_steps 3 --num_heads 2 --per_device_train_batch_size 4 "
    "--generation_workers 1 --dtype float32 --bf16 false",
    "medusa-heads generate": "--tree 4 --max_new_tokens 32",
    "medusa-heads benchmark": "--num_prompts 2 --max_new_tokens 6 --tree 4 --dtypes float32",
}
# `make` targets are checked for existing: running them from within themselves would not end.
MAKE = re.compile(r"^make (\w+)")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def clone(short_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with what the commands read from a clone; the target has two of its layers."""
    for name in ("configs", "Makefile", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "demo-heads").symlink_to(ROOT / "assets" / "demo-heads")
    (tmp_path / "assets" / "demo-target").symlink_to(short_demo)
    (tmp_path / HEADS).parent.mkdir(parents=True)
    (tmp_path / HEADS).symlink_to(ROOT / "assets" / "demo-heads")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("clone")
def test_every_command_and_program(capsys: pytest.CaptureFixture[str]) -> None:
    ran = set()
    for line in "".join(blocks("bash")).splitlines():
        words = shlex.split(line, comments=True)
        if make := MAKE.match(line):
            assert re.search(rf"^{make[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            continue
        if words == [".", ".venv/bin/activate"]:
            continue  # the environment of the tests stands for it
        name = next((name for name in SMALLER if " ".join(words).startswith(name)), None)
        assert name is not None, f"the README has a command that no test runs: {line}"
        # By what the command stands for: a process for each would import everything again.
        (command,) = entry_points(group="console_scripts", name=words[0])
        assert command.load()([*words[1:], *shlex.split(SMALLER[name])]) == 0, line
        ran.add(name)
    assert ran == set(SMALLER)

    (program,) = blocks("python")
    capsys.readouterr()
    exec(program, {})
    out = capsys.readouterr().out
    assert "class Parser" in out and "tokens per step" in out
    assert len(program.strip().splitlines()) <= 12


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120
