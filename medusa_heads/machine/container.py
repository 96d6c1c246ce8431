"""What a container, or another control group of Linux, lets this process have: less than the
machine says that it has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# The limit, what is used, and what of it are files, given up when needed; by version.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_left() -> int | None:
    """Bytes that can still be had in the tightest of the groups around this process; None without
    a limit."""
    left = []
    for group in _groups("memory"):
        for limit, used, cached in _MEMORY:
            with suppress(OSError, ValueError):  # of the other version; "max": no limit
                kept = (group / "memory.stat").read_text().split()
                files = int(kept[kept.index(cached) + 1])
                left.append(_number(group / limit) - _number(group / used) + files)
    return min(left, default=None)


def processors_allowed() -> int | None:
    """As many as the tightest group lets work all the time, rounded up; None without a limit."""
    allowed = []
    for group in _groups("cpu"):
        with suppress(OSError, ValueError):
            quota, period = map(int, (group / "cpu.max").read_text().split())
            allowed.append(math.ceil(quota / period))
        with suppress(OSError, ValueError):
            quota = _number(group / "cpu.cfs_quota_us")
            if quota > 0:
                allowed.append(math.ceil(quota / _number(group / "cpu.cfs_period_us")))
    return min(allowed, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it, as far as they are seen here: a
    container may be told the path on its host."""
    try:
        lines = _OWN.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    for _, names, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if names and controller not in names.split(","):
            continue
        root = _ROOT / controller if names else _ROOT
        own = root / path.lstrip("/")
        yield from (place for place in (own, *own.parents) if place.is_relative_to(root))


def _number(file: Path) -> int:
    return int(file.read_text())
