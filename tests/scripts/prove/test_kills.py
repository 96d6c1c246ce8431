"""The proof of kills in small, and that it would find what is broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from medusa_heads.cli.flags.arguments import run_command
from medusa_heads.files import replace_file
from scripts.prove.killing.folder_state import changed, digest, leftovers, read_folder
from scripts.prove.killing.process import Ending, Gate, Moment, run
from scripts.prove.kills import RECORD_FILE, Record, main
from tests.conftest import Refused

ROOT = Path(__file__).resolve().parents[3]


def prove(out: Path, *flags: str) -> Record:
    command = [sys.executable, "-m", "scripts.prove.kills", "--out", str(out), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Record(out / RECORD_FILE)


@pytest.mark.slow
def test_a_few_kills(tmp_path: Path) -> None:
    record = prove(tmp_path, "--kills", "6", "--only", "convert", "regenerate")
    assert len(record.kills) >= 6 and record.holds()
    assert {kill["signal"] for kill in record.kills} == {"SIGKILL", "SIGTERM"}


@pytest.mark.slow
def test_kills_of_every_command_and_the_negative_control(tmp_path: Path) -> None:
    record = prove(tmp_path, "--kills", "40")
    assert record.holds() and len({chain["command"] for chain in record.chains}) > 10


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--only", "export", "exprot"], "only takes names among ['train-heads', "),
        (["--kills", "0"], "kills must be at least 1, got 0"),
        (["--kills", "few"], "invalid int value: 'few'"),
        (["--killls", "3"], "did you mean '--kills'?"),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence(
    flags: list[str], sentence: str, tmp_path: Path, refused: Refused
) -> None:
    assert sentence in refused(main, ["--out", str(tmp_path), *flags])


def test_a_proof_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    kill = {"signal": "SIGKILL", "inside": "heads", "dying": 0.1, "faults": []}
    chain = {"number": 0, "command": "convert", "kills": [kill], "faults": []}
    Record(tmp_path / "r").add(chain)
    with (tmp_path / "r").open("a") as lines:
        lines.write('{"number": 1, "comm')
    record = Record(tmp_path / "r")
    assert record.chains == [chain] and record.holds()
    record.add({**chain, "faults": ["out/config.json differs"]})
    again = Record(tmp_path / "r")
    assert len(again.kills) == 2 and not again.holds()
    told = again.summary()
    assert "| convert | heads | 2 | 0 |" in told and "config.json" in told
    assert "no control was run" in told
    again.add(
        {"number": "control", "command": "train-heads", "kills": [], "differences": 3}
        | {"faults": []}
    )
    assert "the control differs in 3 things" in again.summary()


def test_too_few_kills_within_a_write_prove_nothing(tmp_path: Path) -> None:
    kills: list[dict[str, Any]] = [
        {"signal": "SIGTERM", "inside": where, "dying": 0.1, "faults": []}
        for where in ("heads", None, None, None)
    ]
    Record(tmp_path / "r").add({"number": 0, "command": "push", "kills": kills, "faults": []})
    assert not Record(tmp_path / "r").holds()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def killed(folder: Path, like: str, sign: signal.Signals, work: Any) -> Ending:
    """`work`, killed where it stands at the first event like this."""
    events = run(work, folder).events
    event = next(number for number, found in enumerate(events, 1) if like in found)
    return run(work, folder, Moment(event, 0.0, held=True), sign)


def test_a_process_stands_where_it_is_killed(folder: Path) -> None:
    def work() -> int:
        replace_file(folder / "a", "new")
        return 0

    ending = killed(folder, "os.rename", signal.SIGKILL, work)
    assert ending.code == -signal.SIGKILL and "os.rename" in str(ending.stood_at)
    assert len(leftovers(folder)) == 1
    assert run(work, folder).code == 0 and leftovers(folder) == []


def test_sigterm_reaches_a_command_that_stands_at_a_rename(folder: Path) -> None:
    def work() -> int:
        return run_command(lambda: replace_file(folder / "a", "new"), prog="tool")

    ending = killed(folder, "os.rename", signal.SIGTERM, work)
    assert ending.code == 143 and ending.output == "tool: ended by SIGTERM\n"
    assert leftovers(folder) == [] and ending.dying is not None


def test_events_of_others_and_the_end_before_the_moment(folder: Path) -> None:
    gate = Gate()

    def work() -> int:
        gate.pass_by("POST /commit")
        return 3

    late = run(work, folder, Moment(9, 0.0, held=True), gate=gate)
    assert (late.code, late.dying, late.events) == (3, None, ["begins", "POST /commit"])
    gate.close()


def test_broken_files_are_named_and_equal_ones_have_equal_digests(tmp_path: Path) -> None:
    save_file({"a": torch.ones(9)}, tmp_path / "heads.safetensors")
    (tmp_path / "metrics.json").write_text(json.dumps({"loss": 0.1, "train_runtime": 1}))
    digests, broken = read_folder(tmp_path)
    assert sorted(digests) == ["heads.safetensors", "metrics.json"] and broken == []
    (tmp_path / "metrics.json").write_text(json.dumps({"train_runtime": 2, "loss": 0.1}))
    assert read_folder(tmp_path) == (digests, [])
    os.truncate(tmp_path / "heads.safetensors", 40)
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a"')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG half")
    broken = read_folder(tmp_path)[1]
    assert [name.partition(":")[0] for name in broken] == [
        "heads.safetensors",
        "picture.png",
        "rows.jsonl",
    ]


def test_a_bit_is_a_difference() -> None:
    one = torch.zeros(2)
    assert digest({"a": one}) == digest({"a": torch.zeros(2)})
    assert digest({"a": one}) != digest({"a": -one}) != digest({"b": -one})
    assert list(changed({"a": [1, 2]}, {"a": [1, 3]})) == [".a[1]: 2 became 3"]
