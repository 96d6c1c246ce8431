"""How fast text becomes rows to train on, and what it leaves in a process's memory.

python -m scripts.measure.preparation

Makes a corpus of one Parquet file, in which lengths are drawn (log-normal) and tokens are made up;
or real text and conversations, which are tokenised. Then starts twice, each time in a process of
its own on one core (`--processes`: on as many), what a rank of a run does before its first step:
find the corpus, prepare its rows (packed), and read some of them. Prints rows a second of the first
start, the seconds of the second, and the memory that is not a mapped file: at its peak, and what
stays.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from medusa_heads.cli.flags.environment import told_to_torch

os.environ.update(told_to_torch())

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetWriter
from rich.table import Table

from medusa_heads.cli.flags.arguments import command
from medusa_heads.machine.facts import describe_machine
from medusa_heads.settings import at_least, flag
from scripts.measure.written import write_report

TOKENIZER = "assets/demo-target"
CHAT = (
    "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + '<|endoftext|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
)
_MADE_AT_ONCE = 50_000  # rows
_PROMPT = 0.3  # of a row of tokens, not learnt
_CHARACTERS = 3  # of text for a token, about
_LOOKED_AT = 512  # rows, after preparation


@dataclass
class MeasureArguments:
    """What to prepare."""

    kind: Literal["tokens", "text", "messages"] = flag(
        "tokens", "tokens are made up; text and messages are tokenised"
    )
    rows: int = flag(100_000, "of the corpus")
    length: int = flag(250, "mean tokens of a row, about")
    max_length: int = flag(2048, "of packed rows, in tokens")
    processes: int = flag(1, "that tokenise, on as many cores, if they may be used")
    folder: str | None = flag(None, "where corpus and caches lie, and stay; default: nowhere")
    output: str = flag("runs/measure_preparation.json", "the numbers")

    def __post_init__(self) -> None:
        at_least(self, 1, "rows", "length", "max_length", "processes")


def write(arguments: MeasureArguments) -> None:
    """Measure as the flags say, and write what comes out."""
    report = measure(arguments)
    write_report(arguments.output, report, table_of(report))


def measure(arguments: MeasureArguments) -> dict[str, Any]:
    """Both starts, on a corpus that is made if it is not there."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary).absolute()
        named = f"{arguments.kind}-{arguments.rows}-{arguments.length}.parquet"
        corpus = folder / named
        if not corpus.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _write(corpus, arguments)
        starts = [_in_a_process(folder, corpus, arguments) for _ in range(2)]
    if starts[0]["rows_sha256"] != starts[1]["rows_sha256"]:
        raise ValueError("the second start read other rows than the first")
    return {"machine": describe_machine(), "arguments": vars(arguments), "starts": starts}


def _write(corpus: Path, arguments: MeasureArguments) -> None:
    made = corpus.with_suffix(".part")
    writer = None
    for number, start in enumerate(range(0, arguments.rows, _MADE_AT_ONCE)):
        draw = np.random.default_rng(number)
        count = min(_MADE_AT_ONCE, arguments.rows - start)
        spread = draw.lognormal(0, 0.8, count) * arguments.length / np.exp(0.32)
        lengths = np.clip(spread.astype(np.int32), 8, arguments.max_length)
        table = _tokens(lengths, draw) if arguments.kind == "tokens" else _texts(lengths, draw)
        if arguments.kind == "messages":
            table = pa.table({"messages": [_talk(text) for text in table["text"].to_pylist()]})
        writer = writer or ParquetWriter(made, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    made.rename(corpus)


def _tokens(lengths: Any, draw: Any) -> pa.Table:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = draw.integers(1, 256, int(offsets[-1])).astype(np.int32)
    place = np.arange(len(ids), dtype=np.int32) - np.repeat(offsets[:-1], lengths)
    labels = np.where(place < np.repeat(lengths * _PROMPT, lengths), np.int32(-100), ids)
    columns = {"input_ids": ids, "labels": labels}
    return pa.table({n: pa.ListArray.from_arrays(offsets, v) for n, v in columns.items()})


def _texts(lengths: Any, draw: Any) -> pa.Table:
    """Pieces of the standard library's sources."""
    from medusa_heads.data.corpus import library_files

    whole = "".join(row["text"] for row in library_files("train"))
    sizes = lengths * _CHARACTERS
    starts = draw.integers(0, len(whole) - int(sizes.max()), len(sizes))
    pairs = zip(starts.tolist(), sizes.tolist(), strict=True)
    return pa.table({"text": ["x" + whole[start : start + size] for start, size in pairs]})


def _talk(text: str) -> list[dict[str, str]]:
    cut = [0, len(text) // 10, len(text) // 2, len(text) * 6 // 10, len(text)]
    roles = ("user", "assistant", "user", "assistant")
    parts = zip(roles, cut, cut[1:], strict=False)
    return [{"role": role, "content": "x" + text[a:b]} for role, a, b in parts]


def _in_a_process(folder: Path, corpus: Path, arguments: MeasureArguments) -> dict[str, Any]:
    with (
        patch.dict(os.environ, HF_DATASETS_CACHE=str(folder / "cache")),
        multiprocessing.get_context("spawn").Pool(1) as pool,
    ):
        return pool.apply(_start_alone, (str(corpus), arguments))


def _start_alone(corpus: str, arguments: MeasureArguments) -> dict[str, Any]:
    import datasets

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.processes])
    datasets.disable_progress_bars()
    return start(corpus, arguments)


def start(corpus: str, arguments: MeasureArguments) -> dict[str, Any]:
    """What a rank does before its first step, and what that costs: seconds, those of the processor,
    and MiB of memory."""
    from transformers import AutoTokenizer

    from medusa_heads.training.arguments.data import DataArguments
    from medusa_heads.training.data.prepare import load_corpora, prepare_data
    from scripts.measure.random_target import random_target

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = CHAT if arguments.kind == "messages" else None
    target = random_target("16x1x2", len(tokenizer), dtype="float32")
    settings = DataArguments(
        dataset=[corpus],
        max_length=arguments.max_length,
        packing=True,
        dataset_num_proc=arguments.processes if arguments.processes > 1 else None,
    )
    gc.collect()
    memory = Memory()
    begun, begun_cpu = time.perf_counter(), _cpu_seconds()
    data = prepare_data(target, *load_corpora(settings), tokenizer, settings, num_heads=4, seed=0)
    rows: Any = data.rows
    digest = hashlib.sha256(f"{data.facts} {data.held_out_facts} {len(rows)}".encode())
    for index in np.linspace(0, len(rows) - 1, min(_LOOKED_AT, len(rows))).astype(int):
        row = rows[int(index)]
        for name in ("input_ids", "labels", "position_ids"):
            digest.update(np.asarray(row[name], np.int64).tobytes())
    found = {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": _cpu_seconds() - begun_cpu,
        "rows": data.facts.rows,
        "tokens": data.facts.tokens,
        "packed_rows": len(rows),
        "rows_sha256": digest.hexdigest(),
    }
    gc.collect()
    return {**found, **memory.mib()}


def _cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    return sum(os.times()[:4])


class Memory:
    """How much of a process's memory no file backs, beyond what it had at first."""

    def __init__(self) -> None:
        self.first = self.most = _anonymous()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, _anonymous())
            time.sleep(0.05)

    def mib(self) -> dict[str, int]:
        """At its peak, and now."""
        pa.default_memory_pool().release_unused()
        return {"peak_mib": self.most - self.first, "kept_mib": _anonymous() - self.first}


def _anonymous() -> int:
    """0 on a system that does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) // 1024


def table_of(report: dict[str, Any]) -> Table:
    """What was measured, for the screen."""
    arguments, (first, second) = report["arguments"], report["starts"]
    title = f"{arguments['rows']} rows of {arguments['kind']}, {arguments['processes']} process(es)"
    table = Table(title=title)
    for name in ("", "seconds", "CPU seconds", "rows/s", "peak MiB", "kept MiB"):
        table.add_column(name, justify="left" if not name else "right")
    for name, found in (("first start", first), ("second start", second)):
        figures = [f"{found['seconds']:.1f}", f"{found['cpu_seconds']:.1f}"]
        figures.append(f"{arguments['rows'] / found['seconds']:.0f}")
        table.add_row(name, *figures, str(found["peak_mib"]), str(found["kept_mib"]))
    table.caption = f"{first['tokens']:,} tokens learnt from, {first['packed_rows']} packed rows"
    return table


main = command("scripts.measure.preparation", write, __doc__)

if __name__ == "__main__":
    sys.exit(main())
