"""Every command and every program in the README runs, in small.

The commands are taken from the README's fenced blocks and run in order, in a folder that looks like
a clone, with flags appended that make them small. A command this file does not know fails the test.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent

HEADS = "runs/demo/heads"  # what `make demo` leaves
SMALLER = {
    "train-heads": "--num_prompts 12 --num_eval_prompts 4 --prompt_length 24 "
    "--continuation_length 24 --max_steps 3 --num_heads 2 --per_device_train_batch_size 4 "
    "--generation_workers 1",
    "medusa-heads generate": "--tree 4",
    "medusa-heads benchmark": "--num_prompts 2 --max_new_tokens 6 --tree 4",
}
# `make` targets are checked for existing: running them from within themselves would not end.
MAKE = re.compile(r"^make (\w+)")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read from a clone."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "assets", "Makefile", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / HEADS).parent.mkdir(parents=True)
    (folder / HEADS).symlink_to(ROOT / "assets" / "demo-heads")
    return folder


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "MEDUSA_HEADS_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_and_program(clone: Path) -> None:
    ran = set()
    for line in "".join(blocks("bash")).splitlines():
        words = shlex.split(line, comments=True)
        if make := MAKE.match(line):
            assert re.search(rf"^{make[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            continue
        if words == [".", ".venv/bin/activate"]:
            continue  # `run` puts the environment of the tests on the PATH
        name = next((name for name in SMALLER if " ".join(words).startswith(name)), None)
        assert name is not None, f"the README has a command that no test runs: {line}"
        run([*words, *shlex.split(SMALLER[name])], clone)
        ran.add(name)
    assert ran == set(SMALLER)

    (program,) = blocks("python")
    out = run([sys.executable, "-c", program], clone)
    assert "class Parser" in out and "tokens per step" in out
    assert len(program.strip().splitlines()) <= 12


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120
