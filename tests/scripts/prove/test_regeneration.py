"""The proof of regeneration in small: a client that dies twice, and a server on a real socket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.prove.regeneration import main


@pytest.mark.slow
def test_a_client_that_is_killed_twice_asks_every_prompt(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--prompts", "300", "--kills", "2", "--real_every", "150", "--out", str(out)]
    assert main(flags) == 0
    report = json.loads((out / "report.json").read_text())
    killed, alone = report["runs"]["killed"], report["runs"]["all"]
    assert (killed["kills"], alone["kills"]) == (2, 0) and len(killed["peaks"]) == 3
    assert killed["accounting"]["reused"] > 0 and killed["real"] > 0
    assert killed["accounting"] == alone["accounting"] | {"reused": killed["accounting"]["reused"]}
    assert 300 < killed["requests"] < 300 + 3 * (2 * 16 + 1)  # what was at hand is asked again
