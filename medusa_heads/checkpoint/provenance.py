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
from importlib import metadata
from pathlib import Path
from typing import Any

_COMMANDS = ("medusa-heads", "train-draft", "train-heads")


def provenance(extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How a checkpoint came to be: command, versions, revision of the code, time (UTC)."""
    packages = ("torch", "transformers", "accelerate", "datasets", "numpy", "safetensors")
    return {
        "command": _command(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("medusa-heads", *packages)},
        "git_sha": _git_sha(),
        **(extra or {}),
    }


def _command() -> str | None:
    """Which of this package's commands runs; None in a program of the user's own."""
    name = Path(sys.argv[0]).name.removesuffix(".py").replace("_", "-")
    return name if name in _COMMANDS else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_sha() -> str | None:
    """Revision of the code that ran, where it ran from a git checkout of its own."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
