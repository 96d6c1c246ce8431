"""How a file of ours came to be: command line, versions, revision of the code, time."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any


def provenance(extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How a checkpoint came to be: command line, versions, revision of the code, time (UTC)."""
    packages = ("medusa-heads", "torch", "transformers", "accelerate", "datasets", "safetensors")
    return {
        "argv": list(sys.argv),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "git_sha": _git_sha(),
        **(extra or {}),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_sha() -> str | None:
    """Revision of the code that ran, where it ran from a git checkout of its own."""
    root = Path(__file__).resolve().parent.parent
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
