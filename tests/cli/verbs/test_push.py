"""`medusa-heads push` and `pull`, over HTTP: what they print, and mistakes in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from medusa_heads import TargetModel
from medusa_heads.checkpoint.checkpoint import load_heads, save_heads
from medusa_heads.cli.verbs import benchmark, generate, pull, push
from tests.hub.hub_server import LocalHub, log_in

TOKEN, SECRET = "hf_alicealicealice", "hf_secretsecretsecret"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub({TOKEN: "alice"}) as hub:
        log_in(hub, TOKEN, tmp_path, monkeypatch)
        yield hub


@pytest.fixture
def heads(speaker: Path) -> str:
    return str(speaker / "heads")


def test_a_dry_run_lists_the_files_and_asks_no_hub(
    hub: LocalHub, heads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--base_model", "alice/target", "--dry_run"]
    assert push.main([heads, "alice/heads", *flags]) == 0
    shown = capsys.readouterr().out
    size = (Path(heads) / "medusa_lm_head.safetensors").stat().st_size
    assert f"medusa_lm_head.safetensors        {size:>13,} bytes\n" in shown
    assert "README.md" in shown and "custom_generate/generate.py" in shown
    assert "bytes, for alice/heads\nNothing was pushed: this is a dry run\n" in shown
    assert hub.requests == []


def test_there_and_back_and_decoded_by_name(
    hub: LocalHub,
    speaker: Path,
    heads: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {path.name: path.read_bytes() for path in (speaker / "target").iterdir()}
    hub.upload("alice/target", files)
    flags = ["--private", "--base_model", "alice/target", "--commit_message", "Mine"]
    assert push.main([heads, "alice/heads", *flags]) == 0
    repository = hub.repositories["alice/heads"]
    address = f"{hub.url}/alice/heads/commit/{repository.refs['main']}"
    assert f"Pushed: {address}\n" in capsys.readouterr().out
    assert repository.private and "Mine" in repository.messages.values()

    out = str(tmp_path / "pulled")
    assert pull.main(["alice/heads", out]) == 0
    assert capsys.readouterr().out == f"Checkpoint: {out}\n"
    assert pull.main(["alice/heads", out]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert pull.main(["alice/heads", out, "--overwrite", "--revision", "main"]) == 0
    capsys.readouterr()

    texts = []
    for name in (heads, out, "alice/heads", f"alice/heads@{repository.refs['main']}"):
        prompt = ["--prompt", "abc", "--max_new_tokens", "12", "--tree", "chain"]
        assert generate.main([name, *prompt]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1 and texts[0]
    small = ["--num-prompts", "1", "--prompt-length", "8", "--max-new-tokens", "4", "--tree", "2"]
    assert benchmark.main(["alice/heads", *small, "--dtypes", "float32"]) == 0
    assert "heads:2" in capsys.readouterr().out


def test_a_proposal(hub: LocalHub, heads: str, capsys: pytest.CaptureFixture[str]) -> None:
    hub.upload("alice/heads", {".gitattributes": b""})
    flags = ["--create_pr", "--base_model", "alice/target", "--license", "mit"]
    assert push.main([heads, "alice/heads", *flags]) == 0
    assert f"Proposed: {hub.url}/alice/heads/discussions/1\n" in capsys.readouterr().out
    tree = hub.repositories["alice/heads"].tree("refs/pr/1")
    assert b"license: mit" in tree["README.md"]


def test_mistakes_are_one_sentence_without_the_token(
    hub: LocalHub, heads: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ["--base_model", "alice/target"]
    mistakes: list[tuple[list[str], str]] = [
        ([heads], "--repo_id is missing"),
        ([heads, "heads", *known], "expected the name of a repository as user/name, got 'heads'"),
        ([heads, "alice/heads"], "knows its target only as 'target' on this machine"),
        ([heads, "bob/heads", *known], "the token may not write to 'bob/heads'"),
        ([heads, "alice/heads", "--create_pr", *known], "the hub has no repository 'alice/heads'"),
        ([f"{heads}/none", "alice/heads"], "expected a heads checkpoint"),
        ([heads, "alice/heads", "--privat"], "did you mean '--private'"),
        ([heads, "alice/heads", *known, "--benchmark", heads], "expected a JSON file"),
    ]
    for argv, sentence in mistakes:
        assert push.main(argv) == 2
        printed = capsys.readouterr()
        assert sentence in printed.err and printed.err.strip().count("\n") == 0
        assert TOKEN not in printed.out + printed.err
    for argv, sentence in (
        (["alice/none"], "the hub has no repository 'alice/none'"),
        (["nowhere"], "expected the name of a repository as user/name"),
    ):
        assert pull.main(argv) == 2
        assert sentence in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
    assert push.main([heads, "alice/heads", *known]) == 2
    printed = capsys.readouterr()
    assert "the hub does not know this token" in printed.err and "hf_wrong" not in printed.err


def test_the_token_is_in_no_traceback_and_no_log(
    hub: LocalHub,
    heads: str,
    tmp_path: Path,
    speaker: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Everything turned up: tracebacks of mistakes, and what all libraries say for debugging."""
    with monkeypatch.context() as loud, caplog.at_level("DEBUG"):
        loud.setenv("MEDUSA_HEADS_TRACEBACK", "1")
        loud.setenv("HF_TOKEN", SECRET)
        loud.setattr("huggingface_hub.constants.HF_DEBUG", True)
        with pytest.raises(ValueError) as raised:
            push.main([heads, "alice/heads", "--base_model", "alice/target"])
    said = caplog.text + "".join(traceback.format_exception(raised.value))
    assert "api/repos/create" in caplog.text and "the hub does not know this token" in said
    assert SECRET not in said
    loaded = load_heads(heads, TargetModel.from_pretrained(str(speaker / "target")))
    story = {"argv": ["train-heads", "--training_args", f'{{"hub_token": "{SECRET}"}}']}
    target = TargetModel.from_pretrained(str(speaker / "target"))
    save_heads(tmp_path / "run", loaded.heads, target, provenance=story)
    assert push.main([str(tmp_path / "run"), "alice/heads", "--base_model", "alice/target"]) == 0
    assert SECRET.encode() not in b"".join(hub.repositories["alice/heads"].tree().values())


@pytest.mark.slow
def test_the_token_is_in_nothing_that_a_process_says(hub: LocalHub, heads: str) -> None:
    """As above, from its first import on."""
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": SECRET,
        "HF_DEBUG": "1",
        "MEDUSA_HEADS_TRACEBACK": "1",
    }
    program = (
        "import logging, sys\nlogging.basicConfig(level=logging.DEBUG)\n"
        "from medusa_heads.cli.main import main\nsys.exit(main())\n"
    )
    command = [sys.executable, "-c", program, "push", heads, "alice/heads"]
    done = subprocess.run(
        [*command, "--base_model", "alice/target"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert "Traceback" in done.stderr and "the hub does not know this token" in done.stderr
    assert SECRET not in done.stdout + done.stderr
