"""The proof of default rates at real widths: what it compares, and its verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.prove.width import Outcome, main, verdict
from tests.conftest import Refused, TinyLlama


def outcomes(wide: float, **control: float) -> list[Outcome]:
    drafted = {("own", 0): 2.0, ("own", 1): 2.04, ("rotated", 0): 2.02, ("wide", 0): wide}
    drafted |= {(name, 0): tokens for name, tokens in control.items()}
    return [
        Outcome("medusa", target, seed, 8, 5e-3, 25, {10: 2.0, 20: 1.0}, tokens, [0.5], 1.0)
        for (target, seed), tokens in drafted.items()
    ]


@pytest.mark.parametrize(("wide", "holds"), [(1.97, True), (1.95, False), (2.05, False)])
def test_the_wide_run_is_held_against_the_small_one_of_its_seed(wide: float, holds: bool) -> None:
    got, sentence = verdict("medusa", outcomes(wide), 0.02)
    assert got == holds and ("NOT within 2%" in sentence) != holds
    assert "rotated at the small width 1.010; over 2 seeds" in sentence


@pytest.mark.parametrize(("undivided", "fails"), [(1.0, True), (1.99, False), (2.1, False)])
def test_the_control_must_fail(undivided: float, fails: bool) -> None:
    got, sentence = verdict("medusa", outcomes(1.99, undivided=undivided), 0.02)
    assert got == fails and f"at the full rate {undivided / 2:.3f}" in sentence


@pytest.mark.slow
def test_a_small_proof(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama(num_layers=1, vocab_size=4096).save_pretrained(tmp_path / "target")
    folders = ["--target", str(tmp_path / "target"), "--output_dir", str(tmp_path / "out")]
    amounts = "--width 128 --num_heads 1 --num_prompts 16 --num_eval_prompts 2 --num_train_epochs 5"
    report = tmp_path / "report.json"
    rest = ["--seeds", "0", "3", "--kinds", "hydra", "eagle3", "--tolerance", "9", "--report"]
    assert main([*folders, *amounts.split(), *rest, str(report)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("of the small width's tokens per step at width 128 (within 900%)") == 2
    story = json.loads(report.read_text())
    for kind in ("hydra", "eagle3"):
        of_kind = [run for run in story["outcomes"] if run["kind"] == kind]
        runs = [(run["target"], run["seed"], run["width"]) for run in of_kind]
        assert runs == [("own", 0, 64), ("wide", 0, 128), ("rotated", 0, 64), ("own", 3, 64)]
    assert {run["steps"] for run in story["outcomes"]} == {10}
    assert story["machine"]["instructions"] is not None and story["settings"]["num_prompts"] == 16
    for run in story["outcomes"]:
        assert run["tokens_per_step"] >= 1 and run["losses"]


def test_unknown_kinds_are_refused(refused: Refused) -> None:
    assert "kinds are medusa, hydra, prefix, block, eagle3" in refused(main, ["--kinds", "eagle"])
