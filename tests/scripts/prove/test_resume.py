"""The resume proof in small: killed twice, it ends like the untouched run; the control fails."""

from pathlib import Path

import pytest
from rich.console import Console

from scripts.prove.resume import Outcome, ProofArguments, prove, verdict


@pytest.mark.slow
def test_two_interruptions_and_the_negative_control(tmp_path: Path) -> None:
    outcome = prove(tmp_path, ProofArguments(kills=2, term_every=2, steps=24), Console())
    assert [stop["signal"] for stop in outcome.interruptions] == ["SIGKILL", "SIGTERM"]
    assert not outcome.differences
    assert "heads" in outcome.control_differences and verdict(outcome)


def test_the_verdict_needs_both() -> None:
    assert verdict(Outcome([], 0, [], ["heads"]))
    assert not verdict(Outcome([], 0, ["heads"], ["heads"]))
    assert not verdict(Outcome([], 0, [], []))
