"""`medusa-heads calibrate`: what it measures and stores, and mistakes that change nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from medusa_heads.checkpoint.draft_checkpoint import save_draft
from medusa_heads.checkpoint.stored_heads import (
    SIDECAR_FILE,
    WEIGHTS_FILE,
    read_sidecar,
    read_stored,
)
from medusa_heads.cli.main import main
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics
from tests.conftest import Refused, TinyLlama

LINES = ("import os, sys", "def main(path):", "    return path.parts[0] + 'a'", "print(main(3))")


@pytest.fixture
def bare(checkpoint: Path, tmp_path: Path) -> Path:
    """A target that speaks bytes, heads without statistics, and text."""
    folder = tmp_path / "bare"
    shutil.copytree(checkpoint, folder)
    rows = [{"text": "\n".join(LINES[i % 4 :] * (1 + i % 3))} for i in range(90)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def calibrate(folder: Path, *flags: str) -> int:
    words = [str(folder / "heads"), "--target", str(folder / "target"), *flags]
    return main(["calibrate", *words])


def test_measured_and_stored(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(bare)
    flags = ["--dataset", str(bare / "text.jsonl"), "--max-positions", "600", "--max_length", "64"]
    assert calibrate(bare, *flags) == 0
    shown = capsys.readouterr().out
    assert "Measuring 2 heads at " in shown and "about" in shown and "Stored in" in shown

    sidecar = read_sidecar(bare / "heads")
    statistics = HeadStatistics.from_dict(sidecar["statistics"])
    assert statistics.num_heads == 2 and 500 <= statistics.positions <= 664
    assert f"{statistics.positions:,} positions" in shown
    assert statistics.dynamic_tokens_per_step and all(t != 1.0 for t in statistics.temperatures)
    told = sidecar["provenance"]["calibrated"]
    assert told["text"]["dataset"] == [str(bare / "text.jsonl")] and told["created"]

    # Nothing but the statistics and their story is another.
    after = files(bare)
    assert {name for name in after if after[name] != before.get(name)} == {f"heads/{SIDECAR_FILE}"}
    old = json.loads(before[f"heads/{SIDECAR_FILE}"])
    assert {key: sidecar[key] for key in old if key not in ("statistics", "provenance")} == {
        key: old[key] for key in old if key not in ("statistics", "provenance")
    }
    del sidecar["provenance"]["calibrated"]
    assert sidecar["provenance"] == old["provenance"]
    read_stored(bare / "heads")  # its checksum holds

    again = ["--dataset", str(bare / "text.jsonl"), "--max-positions", "300"]
    assert calibrate(bare, *again) == 0
    assert read_sidecar(bare / "heads")["statistics"]["positions"] < 500


def test_text_of_the_target_itself(bare: Path) -> None:
    flags = ["--dataset", str(bare / "text.jsonl"), "--self_distill", "--max_positions", "256"]
    assert calibrate(bare, *flags) == 0
    # Two continuations of 128 tokens; the first token of each is known, the last head looks 3 on.
    assert read_sidecar(bare / "heads")["statistics"]["positions"] == 2 * (128 - 2)


def test_an_interruption_loses_nothing(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(bare / "heads")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    assert calibrate(bare, "--dataset", str(bare / "text.jsonl"), "--max_positions", "200") == 130
    assert files(bare / "heads") == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["{}/heads"], "--dataset is missing"),
        ([], "--checkpoint is missing"),
        (["{}/heads", "--dataset", "{}/none.jsonl"], "expected a corpus at"),
        (["{}/heads", "--dataset", "{}/empty.jsonl"], "empty.jsonl: an empty file"),
        (["{}/heads", "--dataset", "{}/short.jsonl"], "no 3 supervised tokens in a row"),
        (["{}/heads", "--dataset", "{}/text.jsonl", "--max_positions", "0"], "at least 1, got 0"),
        (["{}/heads", "--dataset", "{}/text.jsonl", "--max_length", "600"], "context of 512"),
        (["{}/heads", "--dataset", "{}/ids.jsonl", "--self_distill"], "from plain text"),
        (["{}/heads", "--dataset", "stdlib", "{}/text.jsonl"], "give it without other names"),
        (["user/heads", "--dataset", "stdlib"], "with medusa-heads pull"),
        (["user/heads@v2", "--dataset", "stdlib"], "with medusa-heads pull"),
        (["{}/draft", "--dataset", "stdlib"], "found a draft model"),
        (["{}/target", "--dataset", "stdlib"], "found a model without heads"),
        (["{}/text.jsonl", "--dataset", "stdlib"], "expected a heads checkpoint"),
        (["{}/heads", "--dataset", "{}/text.jsonl", "--target", "{}/other"], "another target"),
        (["{}/heads", "--dataset", "{}/text.jsonl", "--target", "{}/none"], "found none"),
        (["{}/heads", "--datset", "stdlib"], "did you mean '--dataset'"),
    ],
)
def test_mistakes_are_one_sentence(
    flags: list[str], message: str, bare: Path, refused: Refused, tiny_llama: TinyLlama
) -> None:
    other = tiny_llama(vocab_size=256, seed=3)
    other.save_pretrained(bare / "other")
    save_draft(bare / "draft", other, TargetModel(other))
    (bare / "empty.jsonl").write_text("")
    (bare / "short.jsonl").write_text('{"text": "ab"}\n')
    (bare / "ids.jsonl").write_text('{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}\n')
    before = files(bare / "heads")
    if flags and "--target" not in flags and flags[0] == "{}/heads":
        flags = [*flags, "--target", "{}/target"]
    assert message in refused(main, ["calibrate", *(flag.format(bare) for flag in flags)])
    assert files(bare / "heads") == before


def test_a_folder_that_may_not_be_written_to(
    bare: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = bare / "heads"
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "access", lambda place, rights: place != heads)
    heads.chmod(0o500)
    try:
        told = refused(main, ["calibrate", str(heads), "--dataset", str(bare / "text.jsonl")])
        assert "nothing may be written" in told
    finally:
        heads.chmod(0o700)
    assert (heads / WEIGHTS_FILE).is_file()
