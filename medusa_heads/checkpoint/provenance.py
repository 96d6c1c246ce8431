"""How a file of ours came to be: command, versions, revision of the code, time.

The command line itself is not kept: what its flags decided stands in records of its own, and what
else it holds (folders, keys, whatever a shell put there) is nobody's business.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

_COMMANDS = ("medusa-heads", "train-draft", "train-heads")


def provenance(extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How a checkpoint came to be; the command is None in a program of the user's own, the revision
    where the code ran from no git checkout of its own."""
    packages = ("torch", "transformers", "accelerate", "datasets", "numpy", "safetensors")
    command = Path(sys.argv[0]).name.removesuffix(".py").replace("_", "-")
    return {
        "command": command if command in _COMMANDS else None,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("medusa-heads", *packages)},
        "git_sha": _git_sha(),
        **(extra or {}),
    }


@cache  # reading a package's metadata takes milliseconds, and a run asks at each of its writes
def version(package: str) -> str | None:
    """Of an installed package; None where it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_sha() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    ask = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(ask, cwd=root, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
