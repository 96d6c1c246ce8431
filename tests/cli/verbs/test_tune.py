"""`medusa-heads tune`: every tree's measured cost, the choice it implies, and mistakes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from medusa_heads import TargetModel
from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.cli.verbs.tune import main
from medusa_heads.inference.adapt.step_bench import SIZES
from medusa_heads.inference.plan import tree_size
from medusa_heads.inference.plan.trees import read_choices
from tests.conftest import Refused


def test_measures_once_and_marks_the_fastest(
    speaker: Path,
    cache: Path,
    quiet: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = str(speaker / "heads")
    assert main([heads]) == 0
    shown = capsys.readouterr().out
    assert all(f"static:{n} " in shown for n in SIZES) and shown.count("<- fastest") == 1
    assert "waited for processors" not in shown
    assert "256 tokens of context" in shown and str(cache) in shown.replace("\n", "")

    # What lies on disk decides from now on.
    (kept,) = (cache / "steps").iterdir()
    measured = json.loads(kept.read_text())
    measured["values"]["static:7"] = [1e-9, 0.0]
    kept.write_text(json.dumps(measured))
    tree = tmp_path / "tree.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main([heads, "--write=~/tree.json"]) == 0
    shown = capsys.readouterr().out
    (marked,) = (line for line in shown.splitlines() if "<- fastest" in line)
    assert "static:7" in marked and f"static:7 written to {tree}" in shown
    statistics = load_heads(heads, TargetModel.from_pretrained(str(speaker / "target"))).statistics
    assert statistics is not None
    assert read_choices(tree) == [list(choice) for choice in statistics.choices(7)]

    assert main([heads, "--refresh"]) == 0
    assert json.loads(kept.read_text())["values"]["static:7"][0] > 1e-9


def test_a_busy_machine_is_named_below_the_table(
    speaker: Path, cache: Path, busy: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(speaker / "heads"), "--context", "8"]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert shown.index("<- fastest") < shown.index("Steps waited for processors")
    assert "Measurements are kept" not in shown and not (cache / "steps").exists()


def test_several_contexts_and_a_batch(
    speaker: Path, cache: Path, quiet: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(speaker / "heads"), "--context", "8", "16", "--batch-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert "8 tokens of context, batch of 2" in shown and "16 tokens of context" in shown
    assert len(list((cache / "steps").iterdir())) == 2


def test_the_chain_of_a_target_that_verifies_no_tree(
    speaker: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_size, "capability", lambda _: "chain")
    tree = tmp_path / "tree.json"
    assert main([str(speaker / "heads"), "--write", str(tree)]) == 0
    choices = read_choices(tree)
    assert choices and all(choice == [0] * (place + 1) for place, choice in enumerate(choices))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], "expected a heads checkpoint"),
        (["{}/heads", "--context", "500"], "do not fit the target's 512 positions: 449 at most"),
        (["{}/heads", "--context", "0"], "at least 1"),
        (["{}/heads", "--batch-size", "0"], "at least 1"),
        (["{}/heads", "--write", "{}/no/tree.json"], "expected a folder at"),
        (["{}/heads", "--write", "{}/target"], "found a folder: choose another"),
        (["{}/heads", "--context", "8", "16", "--write", "x.json"], "give one --context"),
        (["{}/heads", "--batch_size", "513", "--write", "x.json"], "no tree pays for 513 rows"),
        (["{}/heads", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["{}/heads", "--refrsh"], "did you mean '--refresh'"),
        ([], "--checkpoint is missing"),
    ],
)
def test_mistakes_are_one_sentence(
    flags: list[str], message: str, speaker: Path, refused: Refused
) -> None:
    assert message in refused(main, [flag.format(speaker) for flag in flags])


def test_a_tree_that_could_not_be_written(
    speaker: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda place, rights: place != tmp_path)
    flags = [str(speaker / "heads"), "--write", str(tmp_path / "tree.json")]
    assert "but nothing may be written to" in refused(main, flags)


def test_heads_without_statistics(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkpoint / "heads")]) == 2
    assert "carry no statistics" in capsys.readouterr().err
