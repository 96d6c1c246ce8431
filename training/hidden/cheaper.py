"""Whether a cache of hidden states pays for a run, by what this machine and its disk were measured
to do."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from medusa_heads.files import staging
from medusa_heads.training.data.columns import row_lengths
from medusa_heads.training.hidden.prepare import Forwards, Part

_PROBE = 1 << 26  # bytes written to the disk and read back, at most
_OF_FREE = 16  # and of what is free there, one part in so many
_BATCHES = 2  # timed, after one that warms up


@dataclass(frozen=True)
class Costs:
    """What a pass over the text costs: tokens of it and bytes of its states, tokens a second of the
    target in all processes, and bytes a second of the disk."""

    tokens: int
    size: int
    forward: float
    write: float
    read: float

    def once(self, engine: str) -> str:
        """What one pass of another engine takes, which computes for a cache alone."""
        return (
            f"Hidden states: {engine} computes them in {_seconds(self.tokens / self.forward)} "
            f"({self.forward:,.0f} tokens/s); {decimal(self.size)} take "
            f"{_seconds(self.size / self.write)} to write and {_seconds(self.size / self.read)} a "
            "pass to read"
        )

    def sentence(self, passes: float) -> str:
        """Which is cheaper for so many passes."""
        target, write = self.tokens / self.forward, self.size / self.write
        read = self.size / self.read
        online, cached = passes * target, target + write + passes * read
        better, other = ("a cache", "without") if cached < online else ("no cache", "with one")
        less, more = sorted((online, cached))
        count = f"{passes:,.1f}".removesuffix(".0") + (" pass" if passes == 1 else " passes")
        return (
            f"Hidden states: the target computes a pass in {_seconds(target)} ({self.forward:,.0f} "
            f"tokens/s); {decimal(self.size)} take {_seconds(write)} to write "
            f"({decimal(round(self.write))}/s) and {_seconds(read)} a pass to read "
            f"({decimal(round(self.read))}/s): for {count} {better} is cheaper, "
            f"{_seconds(less)} against {_seconds(more)} {other}"
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def measure_costs(forwards: Forwards, part: Part, *, processes: int = 1) -> Costs:
    """Of the rows to train on, in the folder where their states would lie, or the nearest that is
    there. The target runs on a few of the longest rows, in all processes of a run together."""
    lengths = row_lengths(part.rows)
    longest = np.argsort(-lengths, kind="stable")[: part.batch_size]
    rows = part.rows.__getitems__(longest.tolist())
    states = list(forwards.of(rows))
    began = time.perf_counter()
    for _ in range(_BATCHES):
        forwards.forget()
        for _row in forwards.of(rows):
            pass
    seconds = time.perf_counter() - began
    forward = processes * _BATCHES * sum(map(len, states)) / seconds
    place = next(p for p in (part.folder, *part.folder.absolute().parents) if p.is_dir())
    rates = [processes * rate for rate in disk_rates(place)]  # which all ask of it at once
    return Costs(part.key.tokens, part.size(states[0].dtype), forward, *rates)


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes a second that a file there is written with, down to the disk, and read with, from it as
    far as the system lets go of what it holds in memory. OSError where nothing can be written."""
    size = max(min(_PROBE, shutil.disk_usage(folder).free // _OF_FREE), 1)
    content = memoryview(np.random.default_rng(0).bytes(size))
    with staging(folder) as made:
        path = made / "probe"
        began = time.perf_counter()
        with path.open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())
            write = size / (time.perf_counter() - began)
        return write, read_rates([path])


def read_rates(paths: Sequence[Path]) -> float:
    """Bytes a second of files, read one after the other in large pieces, as far as may be from the
    disk."""
    forget(paths)
    buffer, size, began = bytearray(1 << 23), 0, time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while found := file.readinto(buffer):
                size += found
    return size / (time.perf_counter() - began)


def forget(paths: Sequence[Path]) -> None:
    """Let the system drop what it holds of files in memory, where it can be asked to."""
    if hasattr(os, "posix_fadvise"):
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
