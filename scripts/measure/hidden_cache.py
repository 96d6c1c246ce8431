"""How much faster later epochs are when the target's hidden states are read from disk.

python -m scripts.measure.hidden_cache

The real trainer in turns, without and with `hidden_cache auto`, on random text: tokens a second of
an epoch in which the target runs, of the epoch that fills the cache, and of those that read it.
Epochs are timed whole, reading and writing included.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

# Waiting threads sleep instead of spinning; read when torch is loaded, so set before it is.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from datasets import Dataset
from rich.table import Table
from transformers import TrainerCallback

from medusa_heads import HeadsConfig, TargetModel
from medusa_heads.cli.flags.arguments import command
from medusa_heads.heads import new_heads
from medusa_heads.machine import describe_machine
from medusa_heads.settings import at_least
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.data.row_facts import check_rows
from medusa_heads.training.hidden.cache_setup import open_hidden_states
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from scripts.measure.random_target import random_target
from scripts.measure.written import write_report


@dataclass
class MeasureArguments:
    """What to measure, on what."""

    random_target: str = field(
        default="1024x12x16", metadata={"help": "WIDTHxLAYERSxHEADS[xKV_HEADS] of a random Llama"}
    )
    vocabulary: int = field(default=4096, metadata={"help": "of the random target, in tokens"})
    dtype: Literal["float32", "bfloat16"] = field(
        default="float32",
        metadata={"help": "of the target; with bfloat16 the heads, kept in fp32, run in autocast"},
    )
    num_heads: int = field(default=4, metadata={"help": "heads that are trained"})
    rows: int = field(default=8, metadata={"help": "of text in an epoch"})
    length: int = field(default=128, metadata={"help": "tokens of a row, all supervised"})
    batch_size: int = field(default=4, metadata={"help": "rows of text in a step"})
    workers: int = field(default=0, metadata={"help": "processes that read ahead"})
    epochs: int = field(default=3, metadata={"help": "of each run"})
    repeats: int = field(default=2, metadata={"help": "turns"})
    output: str = field(default="runs/measure_hidden_cache.json", metadata={"help": "the numbers"})

    def __post_init__(self) -> None:
        at_least(self, 1, "vocabulary", "num_heads", "rows", "batch_size", "repeats")
        at_least(self, 2, "epochs")
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


def write(arguments: MeasureArguments) -> None:
    """Measure as the flags say, and write what comes out."""
    report = {
        "machine": describe_machine(),
        "arguments": vars(arguments),
        "tokens_per_second": rates(arguments),
    }
    write_report(arguments.output, report, table_of(report))


def rates(arguments: MeasureArguments) -> dict[str, float]:
    """Tokens a second of an epoch, by where hidden states come from; medians."""
    target = random_target(arguments.random_target, arguments.vocabulary, dtype=arguments.dtype)
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.rows, arguments.length)
    ids = torch.randint(target.vocab_size, shape, generator=generator).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    seconds: dict[str, list[float]] = {"target": [], "target, written": [], "cache": []}
    for turn in range(arguments.repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            online = epoch_seconds(arguments, target, rows, CacheArguments(), folder)
            cached = epoch_seconds(arguments, target, rows, CacheArguments("auto"), folder)
        if turn:  # the first warms up
            seconds["target"] += online
            seconds["target, written"].append(cached[0])
            seconds["cache"] += cached[1:]
    tokens = arguments.rows * arguments.length
    return {source: tokens / median(found) for source, found in seconds.items()}


def epoch_seconds(
    arguments: MeasureArguments,
    target: TargetModel,
    rows: Dataset,
    cache: CacheArguments,
    folder: str,
) -> list[float]:
    """Train fresh heads; the seconds of each epoch."""
    heads = new_heads(target, HeadsConfig(num_heads=arguments.num_heads))
    settings = OptimisationArguments(
        output_dir=folder,
        num_train_epochs=arguments.epochs,
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
    args = to_training_arguments(settings, "shared")
    target.model.to(args.device)  # type: ignore[arg-type]
    heads.share(target)
    facts = check_rows(rows, target, name="text", heads_reached=1)
    data = TrainingData(rows, rows, rows, facts, facts, [])
    hidden_states = open_hidden_states(
        cache, target, data, heads.config, args, target_weights_sha256="", resumed=False
    )
    stopwatch = Stopwatch()
    trainer = HeadsTrainer(heads, target, args, rows, hidden_states=hidden_states)
    trainer.add_callback(stopwatch)
    trainer.train()
    return stopwatch.seconds


def table_of(report: dict[str, Any]) -> Table:
    """What was measured, for the screen."""
    arguments = report["arguments"]
    table = Table(title=f"random target {arguments['random_target']}, {arguments['dtype']}")
    table.add_column("hidden states from")
    table.add_column("tokens/s", justify="right")
    table.add_column("times the target's", justify="right")
    found = report["tokens_per_second"]
    for source, value in found.items():
        table.add_row(source, f"{value:.0f}", f"{value / found['target']:.2f}")
    return table


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


main = command("scripts.measure.hidden_cache", write, __doc__)

if __name__ == "__main__":
    sys.exit(main())
