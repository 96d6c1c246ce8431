"""How fast training goes from hidden states on disk, and how fast they are read.

python -m scripts.measure.hidden_cache

The real trainer in turns, without and with `hidden_cache auto`, on random text: tokens a second of
an epoch in which the target runs, of writing the states, and of epochs that read them. Then the
states alone are read, row by row, beside the disk's own rate for the same files in large pieces:
as far as may be from the disk, and from the system's memory. Of these the processor's time is
measured, too: what is left where the machine does nothing else.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from medusa_heads.cli.flags.environment import told_to_torch

os.environ.update(told_to_torch())

import torch
from datasets import Dataset
from rich.filesize import decimal
from rich.table import Table
from transformers import TrainerCallback, TrainingArguments

from medusa_heads import HeadsConfig, TargetModel
from medusa_heads.cli.flags.arguments import command
from medusa_heads.heads import new_heads
from medusa_heads.machine.facts import describe_machine
from medusa_heads.settings import at_least, flag
from medusa_heads.tables import on_screen
from medusa_heads.training.arguments.cache import CacheArguments, CachedDtype
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.data.row_facts import check_rows
from medusa_heads.training.hidden.cache_setup import open_hidden_states, parts_of
from medusa_heads.training.hidden.cheaper import forget, read_rates
from medusa_heads.training.hidden.prepare import write_parts
from medusa_heads.training.hidden.states import ShardLocalOrder
from medusa_heads.training.hidden.store import HiddenCache
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from scripts.measure.random_target import random_target
from scripts.measure.written import write_report

Pair = tuple[float, float]


@dataclass
class MeasureArguments:
    """What to measure, on what."""

    random_target: str = flag("1024x12x16", "WIDTHxLAYERSxHEADS[xKV_HEADS] of a random Llama")
    vocabulary: int = flag(4096, "of the random target, in tokens")
    dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "of the target; with bfloat16 the heads, kept in fp32, run in autocast"
    )
    stored_in: CachedDtype = flag("auto", "dtype on disk")
    num_heads: int = flag(4, "heads that are trained")
    rows: int = flag(8, "of text in an epoch")
    length: int = flag(128, "tokens of a row, all supervised")
    batch_size: int = flag(4, "rows of text in a step")
    workers: int = flag(0, "processes that read ahead")
    epochs: int = flag(3, "of each run; 0: states are read alone")
    repeats: int = flag(2, "turns")
    folder: str | None = flag(None, "on the disk to measure")
    output: str = flag("runs/measure_hidden_cache.json", "the numbers")

    def __post_init__(self) -> None:
        at_least(self, 1, "vocabulary", "num_heads", "rows", "batch_size", "repeats")
        at_least(self, 0, "epochs")
        at_least(self, 3, "length")


class Stopwatch(TrainerCallback):
    """Seconds of each epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.begun = 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.begun = _now()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(_now() - self.begun)


@dataclass
class Runs:
    """Runs on the same random text, whose states lie in a folder."""

    arguments: MeasureArguments
    target: TargetModel
    data: TrainingData
    folder: str

    def settings(self, cache: str) -> tuple[CacheArguments, TrainingArguments]:
        """Of a run with such a cache."""
        arguments = self.arguments
        optimisation = OptimisationArguments(
            output_dir=self.folder,
            num_train_epochs=max(arguments.epochs, 1),
            per_device_train_batch_size=arguments.batch_size,
            bf16=arguments.dtype == "bfloat16",
            training_args={
                "disable_tqdm": True,
                "eval_strategy": "no",
                "save_strategy": "no",
                "logging_strategy": "no",
                "dataloader_num_workers": arguments.workers,
            },
        )
        settings: Any = (cache, None, arguments.stored_in)
        return CacheArguments(*settings), to_training_arguments(optimisation, "shared")

    def write(self) -> float:
        """Write the states; the seconds that takes."""
        config = HeadsConfig(num_heads=self.arguments.num_heads)
        cache, args = self.settings("auto")
        parts = parts_of(cache, self.target, self.data, config, args, "")
        begun = _now()
        write_parts(self.target, parts[:1])
        self.cache = HiddenCache(parts[0].folder, parts[0].key)
        return _now() - begun

    def epochs(self, cache: str) -> list[float]:
        """Train fresh heads; the seconds of each epoch."""
        heads = new_heads(self.target, HeadsConfig(num_heads=self.arguments.num_heads))
        settings, args = self.settings(cache)
        self.target.model.to(args.device)  # type: ignore[arg-type]
        heads.share(self.target)
        run = settings, self.target, self.data, heads.config, args
        states = open_hidden_states(*run, target_weights_sha256="")
        stopwatch = Stopwatch()
        trainer = HeadsTrainer(heads, self.target, args, self.data.rows, hidden_states=states)
        trainer.add_callback(stopwatch)
        trainer.train()
        return stopwatch.seconds

    def reading(self) -> dict[str, Pair]:
        """Bytes a second of all rows, by how they are read, and of the disk; and bytes a second of
        the processor's time."""
        layout, shards = self.cache.index.layout, sorted(self.cache.folder.glob("*.states"))
        place_of = {row: place for place, row in enumerate(layout.order().tolist())}
        order = ShardLocalOrder(layout, layout.seed or 0)
        order.set_epoch(1)
        local = [place_of[row] for row in order]
        mixed = torch.randperm(len(local)).tolist()
        used = time.process_time()
        found = {
            "the disk, whole files": (
                read_rates(shards),
                self.cache.size / _since(used),
            )
        }
        for name, places in (("shard by shard", local), ("in any order", mixed)):
            forget(shards)
            found[f"rows, {name}"] = self._rate(places)
        self._rate(local)
        found["rows, from memory"] = self._rate(local)
        return found

    def _rate(self, places: Iterable[int]) -> Pair:
        cache = HiddenCache(self.cache.folder, self.cache.key)
        begun, used = time.perf_counter(), time.process_time()
        for place in places:
            cache.read_place(place).clone()
        took = time.perf_counter() - begun, _since(used)
        return cache.size / took[0], cache.size / took[1]


def write(arguments: MeasureArguments) -> None:
    """Measure as the flags say, and write what comes out."""
    report = {"machine": describe_machine(), "arguments": vars(arguments), **measure(arguments)}
    write_report(arguments.output, report, table_of(report))


def measure(arguments: MeasureArguments) -> dict[str, Any]:
    """Tokens a second of an epoch, by where hidden states come from; and the rates of reading them;
    medians."""
    target = random_target(arguments.random_target, arguments.vocabulary, dtype=arguments.dtype)
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.rows, arguments.length)
    ids = torch.randint(target.vocab_size, shape, generator=generator).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    facts = check_rows(rows, target, name="text", heads_reached=1)
    data = TrainingData(rows, rows, rows, facts, facts, [])
    seconds: dict[str, list[float]] = {"target": [], "target, written": [], "cache": []}
    reading: list[dict[str, Pair]] = []
    for turn in range(0 if arguments.epochs else 1, arguments.repeats + 1):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            runs = Runs(arguments, target, data, folder)
            online = runs.epochs("off") if arguments.epochs else []
            written = runs.write()
            cached = runs.epochs("read") if arguments.epochs else []
            reading.append(runs.reading())
            size = runs.cache.size
        if turn:  # the first warms up
            seconds["target"] += online
            seconds["target, written"].append(written)
            seconds["cache"] += cached
    tokens = arguments.rows * arguments.length
    return {
        "tokens_per_second": {n: tokens / median(found) for n, found in seconds.items() if found},
        "bytes": size,
        "bytes_per_second": {n: median(each[n][0] for each in reading) for n in reading[0]},
        "of_processor": {n: median(each[n][1] for each in reading) for n in reading[0]},
    }


def table_of(report: dict[str, Any]) -> Table:
    """What was measured, for the screen."""
    arguments, found = report["arguments"], report["tokens_per_second"]
    title = f"random target {arguments['random_target']}, {arguments['dtype']}"
    title = f"{title}, {arguments['rows']} rows of {decimal(report['bytes'])}"
    columns = ("hidden states from", "tokens/s", "rows/s", "bytes/s", "of the processor")
    cells = [[source, f"{value:,.0f}", "", "", ""] for source, value in found.items()]
    for source, value in report["bytes_per_second"].items():
        rows = arguments["rows"] * value / report["bytes"]
        tokens = rows * arguments["length"]
        rates = (decimal(round(rate)) for rate in (value, report["of_processor"][source]))
        cells.append([source, f"{tokens:,.0f}", f"{rows:,.0f}", *rates])
    return on_screen(title, (columns, cells))


def _since(used: float) -> float:
    """Seconds of processor time; a busy system may have told of none yet."""
    return max(time.process_time() - used, 1e-9)


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


main = command("scripts.measure.hidden_cache", write, __doc__)

if __name__ == "__main__":
    sys.exit(main())
