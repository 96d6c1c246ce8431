"""The benchmark of a grown target in memory, and the script that measures all on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.grown.benchmark import main, other_texts
from scripts.grown.shape import SHAPES
from tests.conftest import Refused

ROOT = Path(__file__).parents[3]
SMALLER = {
    "hidden_size": 512,
    "intermediate_size": 1280,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 7,
    "vocab_size": 5000,
}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's heads name their target from there."""
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["own", "0.1b"])
def test_texts_are_plain_decodings(
    shape: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The demo's target has six layers and 4,096 tokens: larger in every size.
    monkeypatch.setitem(SHAPES, "0.1b", SHAPES["0.1b"].with_sizes(SMALLER))
    flags = ["--shape", shape, "--dtype", "float32", "--must_be_identical", "--methods"]
    flags += ["heads:static:4", "--num_prompts", "1", "--prompt_length", "12"]
    flags += ["--max_new_tokens", "6"]
    assert main([*flags, "--batch_sizes", "1", "2", "--report", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [setting["batch_size"] for setting in report["settings"]] == [1, 2]
    assert [setting["prompts"] for setting in report["settings"]] == [2, 4]
    for setting in report["settings"]:
        plain, heads = setting["methods"]
        assert heads["identical"] == 1.0 and heads["tokens"] == plain["tokens"]
    assert ("grown to 0.1b" in report["target"]) == (shape == "0.1b")
    assert ("logits differ by" in capsys.readouterr().out) == (shape == "0.1b")
    assert report["target"] in (tmp_path / "report.md").read_text()


def test_other_texts_are_told() -> None:
    def setting(name: str, rows: int, *identical: float) -> dict[str, Any]:
        methods: list[dict[str, Any]] = [{"name": "plain-compiled", "identical": identical[0]}]
        ours = {"name": "heads", "accepted_by_depth": []}
        methods += [ours | {"identical": share} for share in identical[1:]]
        return {"name": name, "batch_size": rows, "prompts": 4, "methods": methods}

    same = [setting("greedy", 8, 0.5, 1.0), setting("sampled", 8, 1.0, 0.5)]
    assert other_texts({"settings": same}) == []
    (line,) = other_texts({"settings": [*same, setting("sampled", 1, 1.0, 0.75)]})
    assert line.startswith("heads wrote other text") and "75% of 4" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_prompts", "0"], "at least 1"),
        (["--batch_sizes", "0"], "at least 1"),
        (["--decodings", "beam"], "expected decodings among greedy, sampled, got 'beam'"),
        (["--methods", "draft-model"], "needs a draft model"),
        (["--shape", "3b"], "invalid choice: '3b'"),
        (["--heads", "nowhere"], "expected a heads checkpoint"),
    ],
)
def test_mistakes_are_one_sentence(flags: list[str], message: str, refused: Refused) -> None:
    assert message in refused(main, flags)


def test_tests_that_run_on_a_gpu_are_there() -> None:
    told = next(
        line
        for line in (ROOT / "scripts" / "gpu_bench.sh").read_text().splitlines()
        if "recorded=(" in line
    )
    named = subprocess.run(
        ["bash", "-c", f'{told}; printf "%s\\n" "${{recorded[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(named) == 3 and all((ROOT / name).is_file() for name in named)


@pytest.mark.slow
def test_all_parts_in_one_call(tmp_path: Path) -> None:
    settings = {
        "SHAPE": "own",
        "DEVICE": "cpu",
        "PATIENCE": "9",
        "BATCH_SIZES": "1 2",
        "NUM_PROMPTS": "1",
        "NEW_TOKENS": "4",
        "COMPILE": "0",
        "OUT": str(tmp_path),
        "PYTHON": sys.executable,
    }
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_bench.sh"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = (tmp_path / "parts.txt").read_text().splitlines()
    names = ["lossless", "lossless-batch", "sampled", "usual-1", "usual-2"]
    assert sorted(line.split(":")[0] for line in parts) == names
    assert all(": done after " in line for line in parts)
    for name in names:
        assert json.loads((tmp_path / name / "report.json").read_text())["settings"]
