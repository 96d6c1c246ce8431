"""The commands and programs of docs/tutorial.md, in order, with a tiny chat model on a hub here.

What belongs to others (`vllm serve`) or makes an environment is not run; anything else that this
file does not know fails the test.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_heads.cli import train_heads
from tests.conftest import TinyLlama
from tests.hub.hub_server import LocalHub, log_in
from tests.inference.regeneration.completion_server import CompletionServer, serving
from tests.inference.speaking import save_speaker

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
TOKEN = "hf_useruseruser"
QUESTIONS = [f"what is {word}" for word in ("love", "time", "this", "up", "new", "on", "it", "now")]
NOT_OURS = ("python3 -m venv", ". .venv", "pip install", "vllm serve")
LAUNCHER = re.compile(r"^accelerate launch .* -m medusa_heads\.cli\.train_heads ")
TRAINING = (
    "--eval_rows 2 --num_heads 2 --max_length 64 --max_steps 2 --eval_steps 2 --save_steps 2 "
    "--per_device_train_batch_size 2 --dtype float32 --bf16 false "
    "--draft_vocab_size 16"  # as the default chooses a part of a large vocabulary
)
SMALLER = {
    "medusa-heads env": "",
    "medusa-heads regenerate": "--max_new_tokens 12",
    "train-heads": TRAINING,
    "medusa-heads chat": "--max_new_tokens 8",
    "medusa-heads tune": "--context 16",
    "medusa-heads benchmark": "--num_prompts 2 --max_new_tokens 6 --tree 2 --dtypes float32",
    "medusa-heads push": "",
    "medusa-heads pull": "",
    "medusa-heads export": "",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


@pytest.fixture(autouse=True, scope="module")
def pictures(module_patch: pytest.MonkeyPatch) -> None:
    """That of the benchmark alone, which is pushed."""
    module_patch.setattr("medusa_heads.training.measure.report.draw_plots", lambda *_: [])


@pytest.fixture
def hub(
    tiny_llama: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalHub]:
    """A hub with the model, and this process in an empty folder with what the reader brings."""
    model = save_speaker(tmp_path / "model", tiny_llama)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    talks = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    Path("chats.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    Path("questions.jsonl").write_text('{"turns": ["who are you"]}\n{"turns": ["why"]}\n')
    (config,) = blocks("yaml")
    Path("my-heads.yaml").write_text(config)
    with LocalHub({TOKEN: "user"}) as hub:
        log_in(hub, TOKEN, tmp_path, monkeypatch)
        hub.upload("user/my-llama", {path.name: path.read_bytes() for path in model.iterdir()})
        yield hub


@pytest.fixture
def server(hub: LocalHub, tmp_path: Path) -> Iterator[CompletionServer]:
    """What `vllm serve` would be."""
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with serving(model, AutoTokenizer.from_pretrained(tmp_path / "model")) as server:
        yield server


def run(line: str, server: CompletionServer) -> str | None:
    """Run a line of the page, made smaller; the name of what was run."""
    if line.startswith(NOT_OURS):
        return None
    if launcher := LAUNCHER.match(line):
        # tests/training/runs/test_processes.py launches processes; here its flags go through one.
        given = shlex.split(line[launcher.end() :]) + shlex.split(TRAINING)
        assert train_heads.main([*given, "--output_dir", "runs/my-heads/eight"]) == 0, line
        return "accelerate launch"
    name = next((name for name in SMALLER if line.startswith(name + " ")), None)
    assert name is not None, f"the tutorial has a command that no test runs: {line}"
    program, *given = shlex.split(line.replace("http://localhost:8000/v1", server.url))
    (command,) = entry_points(group="console_scripts", name=program)
    assert command.load()([*given, *shlex.split(SMALLER[name])]) == 0, line
    return name


def test_the_tutorial_runs(
    hub: LocalHub,
    server: CompletionServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    ran = {run(" ".join(line.split()), server) for line in lines}
    assert ran == {*SMALLER, "accelerate launch", None}
    assert server.requests, "nothing was asked of the server"
    assert hub.repositories["user/my-heads"].private
    with safe_open("runs/my-heads/vllm/model.safetensors", "pt") as exported:
        assert "token_map" not in exported.keys(), "vLLM 0.32 would refuse it"  # noqa: SIM118
    printed = capsys.readouterr().out
    assert "Dry run" in printed and "Nothing was pushed" in printed
    (program,) = blocks("python")
    exec(program, {})
    assert capsys.readouterr().out.split() == ["user/my-llama", "2"]
