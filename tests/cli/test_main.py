"""The command medusa-heads: help, version, verbs, and mistakes in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from medusa_heads.cli.main import VERBS, main
from tests.conftest import Refused


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"]):
        assert main(argv) == 0
        shown = capsys.readouterr().out
        assert all(
            f"  {verb} " in shown and purpose in shown for verb, (_, purpose) in VERBS.items()
        )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"medusa-heads {metadata.version('medusa-heads')}\n"


def test_the_package_is_the_command() -> None:
    """Where the folder of commands is not on the PATH."""
    command = [sys.executable, "-m", "medusa_heads", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == f"medusa-heads {metadata.version('medusa-heads')}\n"


def test_an_unknown_verb_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmrk", "x"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip() == (
        "medusa-heads: error: unknown verb 'benchmrk'; did you mean 'benchmark'?"
    )


@pytest.mark.parametrize("verb", ["train", "train-heads", "train_draft", "finetune-train"])
def test_whoever_wants_to_train_is_sent_to_the_other_commands(verb: str, refused: Refused) -> None:
    assert "heads are trained with the command train-heads" in refused(main, [verb])


def test_help_imports_nothing_heavy() -> None:
    """Of no verb: one process shows them all, and what it imports stays imported."""
    program = f"""
import sys
from medusa_heads.cli.main import main
for argv in {[["--help"], *([verb, "--help"] for verb in VERBS)]}:
    try:
        code = main(argv)
    except SystemExit as end:
        code = end.code or 0
    heavy = {{"torch", "transformers", "datasets", "matplotlib"}} & set(sys.modules)
    assert code == 0 and not heavy, (argv, code, heavy)
"""
    before = os.times().children_user
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert os.times().children_user - before < 1  # seconds of its own, however busy the machine
    for verb in VERBS:
        assert f"usage: medusa-heads {verb}" in done.stdout
    assert "--greedy_share" in done.stdout and "--api_key_variable" in done.stdout


def test_mistakes_of_the_benchmark_verb(tmp_path: Path, refused: Refused) -> None:
    mistakes = {
        (): "checkpoint is missing",
        (str(tmp_path / "none"),): "expected a heads checkpoint",
        (str(tmp_path), "--report", __file__): "expected a folder at",
        (str(tmp_path), "--dtypes", "int8"): "among bfloat16, float16, float32, got 'int8'",
        (str(tmp_path), "--num-prompt", "3"): "did you mean '--num_prompts'",
    }
    for argv, sentence in mistakes.items():
        assert sentence in refused(main, ["benchmark", *argv])
