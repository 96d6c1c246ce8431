"""Processes that die in the middle of what they write."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from scripts.prove.forks import make_forks_safe


def dies(work: Callable[[], object], *, renames: int | None = None) -> bool:
    """Run `work` in a process that gets SIGKILL at a rename, when `renames` of them are done, or
    by itself.

    Returns:
        Whether it came so far; if not, it has ended well.
    """
    make_forks_safe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            if renames is not None:
                _die_after(renames)
            work()
            code = 0
        finally:
            os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert ended in (0, -signal.SIGKILL)
    return ended != 0


def _die_after(renames: int) -> None:
    rename, left = os.replace, renames

    def dying(source: Any, place: Any) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        rename(source, place)

    os.replace = dying  # type: ignore[assignment]
