"""The proof of regeneration in small: a client that dies twice, and a server on a real socket."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_client_that_is_killed_twice_asks_every_prompt(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.prove.regeneration", "--out", str(tmp_path / "out")]
    command += ["--prompts", "300", "--kills", "2", "--real_every", "150"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    killed, alone = report["runs"]["killed"], report["runs"]["all"]
    assert (killed["kills"], alone["kills"]) == (2, 0) and len(killed["peaks"]) == 3
    assert killed["accounting"]["reused"] > 0 and killed["real"] > 0
    assert killed["accounting"] == alone["accounting"] | {"reused": killed["accounting"]["reused"]}
    assert 300 < killed["requests"] < 300 + 3 * (2 * 16 + 1)  # what was at hand is asked again
