"""How long many processes take to open one cache of hidden states that has many shards.

python -m scripts.measure.hidden_opening

A cache of 10,000 shards is laid out without its states: its files have their full size and hold
nothing but headers. Then as many processes as a large run has, all at once, open it and read a row.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.filesize import decimal
from rich.table import Table

from medusa_heads.cli.flags.arguments import command
from medusa_heads.machine.facts import describe_machine
from medusa_heads.settings import at_least, flag
from medusa_heads.training.hidden.cached_rows import NAME_BYTES
from medusa_heads.training.hidden.layout import CacheKey, Index, Layout, shard_name
from medusa_heads.training.hidden.store import HiddenCache, seal
from scripts.measure.written import write_report


@dataclass
class OpeningArguments:
    """What to open, and how often."""

    shards: int = flag(10_000, "of the cache")
    rows: int = flag(16, "in a shard")
    positions: int = flag(512, "kept of a row")
    width: int = flag(4096, "columns of the states, in bf16")
    ranks: int = flag(64, "processes that open it at once")
    folder: str | None = flag(None, "on the disk to measure")
    output: str = flag("runs/measure_opening.json", "the numbers")

    def __post_init__(self) -> None:
        at_least(self, 1, "shards", "rows", "positions", "width", "ranks")


def write(arguments: OpeningArguments) -> None:
    """Measure as the flags say, and write what comes out."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        begun = time.perf_counter()
        size, key = lay_out(Path(folder) / "cache", arguments)
        laid = time.perf_counter() - begun
        seconds = open_at_once(Path(folder), key, arguments)
    report: dict[str, Any] = {
        "machine": describe_machine(),
        "arguments": vars(arguments),
        "bytes": size,
        "seconds_to_lay_out": laid,
        "seconds_to_open": seconds,
    }
    write_report(arguments.output, report, table_of(report))


def lay_out(folder: Path, arguments: OpeningArguments) -> tuple[int, CacheKey]:
    """A whole cache all states of which are 0, which take no room on the disk; its bytes."""
    rows = arguments.shards * arguments.rows
    tokens = rows * arguments.positions
    key = CacheKey(
        *("weights", "settings", "bfloat16"),
        hidden_size=arguments.width,
        features=[],
        positions="all",
        stored_in="auto",
        rows=rows,
        tokens=tokens,
        rows_sha256="rows",
    )
    starts = np.arange(rows + 1, dtype=np.int64) * arguments.positions
    index = Index(key, Layout(rows, 1, arguments.rows, 0, "bfloat16"), starts=starts)
    index.write(folder)
    check = np.uint32(zlib.crc32(bytes(arguments.positions * index.position_bytes)))
    checks = np.full(arguments.rows, check, "<u4").tobytes()
    size = 0
    for shard in range(arguments.shards):
        names = np.random.default_rng(shard).bytes(NAME_BYTES * arguments.rows)
        with (folder / shard_name(shard)).open("wb") as file:
            file.write(index.shard_head(shard).ljust(64, b"\0") + names + checks)
            file.truncate(index.shape(shard).end)
        size += index.shape(shard).end
    seal(folder, index)
    return size, key


def open_at_once(folder: Path, key: CacheKey, arguments: OpeningArguments) -> list[list[float]]:
    """The seconds of each process until it has read a row of its own, and those that the processor
    worked for it."""
    wait, go = os.pipe()
    children = []
    for rank in range(arguments.ranks):
        if child := os.fork():
            children.append(child)
            continue
        code = 1
        try:
            os.close(go)
            os.read(wait, 1)  # ends when the parent closes its end
            begun, used = time.perf_counter(), time.process_time()
            cache = HiddenCache(folder / "cache", key)
            cache.read_place(rank * cache.index.layout.rows // arguments.ranks)
            took = time.perf_counter() - begun, time.process_time() - used
            (folder / f"{rank}.json").write_text(json.dumps(took))
            code = 0
        finally:
            os._exit(code)
    os.close(wait)
    os.close(go)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), "a process failed"
    return [json.loads((folder / f"{n}.json").read_text()) for n in range(arguments.ranks)]


def table_of(report: dict[str, Any]) -> Table:
    """What was measured, for the screen."""
    arguments, (seconds, worked) = report["arguments"], zip(*report["seconds_to_open"], strict=True)
    table = Table("shards", "rows", "bytes", "processes", "median, s", "longest, s")
    table.add_column("processor, s")
    table.add_row(
        f"{arguments['shards']:,}",
        f"{arguments['shards'] * arguments['rows']:,}",
        decimal(report["bytes"]),
        str(arguments["ranks"]),
        f"{median(seconds):.3f}",
        f"{max(seconds):.3f}",
        f"{median(worked):.3f}",
    )
    return table


main = command("scripts.measure.hidden_opening", write, __doc__)

if __name__ == "__main__":
    sys.exit(main())
