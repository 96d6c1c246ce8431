"""Forks of a process that may have computed with several threads and shown progress, and that may
be killed at any moment."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import cache
from pathlib import Path

_PAUSE_HARD = (
    2  # of OpenMP 5.0's omp_pause_resource_t: the threads end, and are made anew when used
)


@cache
def make_forks_safe() -> None:
    """Let every later fork of this process compute and show progress, whatever others do.

    A fork has none of its parent's threads, yet waits for those that OpenMP keeps in a pool; so
    they end before it, and both make new ones. And tqdm's lock is one for all forks: one that is
    killed while it prints would keep all others waiting; so each gets its own.
    """
    os.register_at_fork(before=_end_pool, after_in_child=_begin)


def _begin() -> None:
    _settle_threads()
    _lock_bars()


def _end_pool() -> None:
    if "torch" in sys.modules:
        for library in _openmp():
            library.omp_pause_resource_all(_PAUSE_HARD)


def _openmp() -> list[ctypes.CDLL]:
    """The libraries of OpenMP that are loaded."""
    if not (maps := Path("/proc/self/maps")).exists():
        return []
    places = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line}
    return [
        ctypes.CDLL(place)
        for place in sorted(places)
        if Path(place).name.startswith(("libgomp", "libomp", "libiomp"))
    ]


def _settle_threads() -> None:
    """Make torch's threads now. Else the first ones that compute make them all at once, and some
    are told of an invalid thread pool."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(torch.get_num_threads())


def _lock_bars() -> None:
    if std := sys.modules.get("tqdm.std"):
        kinds = [std.tqdm]
        for kind in kinds:
            kinds += kind.__subclasses__()
            if "_lock" in vars(kind):
                kind.set_lock(threading.RLock())
