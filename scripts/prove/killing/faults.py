"""What is wrong with how a process ended, and with what it left; nothing is no fault."""

from __future__ import annotations

import json
import signal
from itertools import islice
from pathlib import Path

from scripts.prove.killing.folder_state import changed, without_times
from scripts.prove.killing.process import GRACE, Ending

SIGTERM_CODE = 128 + signal.SIGTERM


def how_it_differs(one: Path, other: Path, name: str) -> str:
    """In what a JSON file differs, in short."""
    if not name.endswith(".json") or not (one / name).exists() or not (other / name).exists():
        return ""
    said = [without_times(json.loads((folder / name).read_text())) for folder in (one, other)]
    return f" ({'; '.join(islice(changed(*said), 3))})"


def of_the_end(ending: Ending) -> list[str]:
    """What is wrong with a process that came to its end."""
    if ending.code == 0 and "Traceback" not in ending.output:
        return []
    return [f"ended with code {ending.code}: {ending.output[-600:]}"]


def of_the_death(ending: Ending, sign: signal.Signals) -> list[str]:
    """What is wrong with how a process took its signal."""
    if sign is signal.SIGKILL:
        return [] if ending.code == -sign else [f"SIGKILL ended it with code {ending.code}"]
    faults = []
    if ending.code != SIGTERM_CODE:
        faults.append(f"SIGTERM ended it with code {ending.code}")
    if ending.dying is not None and ending.dying > GRACE / 2:
        faults.append(f"it took {ending.dying:.0f} s to end after SIGTERM")
    if "Traceback" in ending.output or "SIGTERM" not in ending.output:
        faults.append(f"SIGTERM was answered with {ending.output[-300:]!r}")
    return faults
