"""A run in miniature, on the machine and the target of the run: what the whole run takes follows.

It is done at two sizes, so that what a step takes anyway (the optimiser, small kernels) is told
apart from what grows with its tokens. Everything is the run's own: its target, its longest rows,
its loss, its evaluation and its end.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from medusa_heads.config import IGNORED
from medusa_heads.files import read_json
from medusa_heads.machine.memory import PeakMemory
from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.columns import row_lengths, stretches
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.measure.calibration import MAX_POSITIONS
from medusa_heads.training.runs.dry_run import byte_size
from medusa_heads.training.runs.record import METRICS_FILE

_STEPS = 4  # of each size; the first warms up
_DRAWN = 4096  # rows that the mean batch is reckoned from


@dataclass(frozen=True)
class Line:
    """What something takes: a part that is always there, and one for each unit of a size."""

    fixed: float
    each: float

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> Line:
        """Of what two sizes took, (size, taken). Noise makes neither part negative."""
        (less, taken), (more, most) = small, large
        each = min(max((most - taken) / max(more - less, 1), 0.0), most / max(more, 1))
        return cls(most - each * more, each)

    def at(self, size: float) -> float:
        return self.fixed + self.each * size


@dataclass(frozen=True)
class Measured:
    """A run in miniature: padded tokens of its batches and what a step took; padded held-out tokens
    and what their evaluation took; held-out tokens that are learnt, and the rest, before the first
    step and behind the last evaluation; all in seconds. And the most bytes that were held."""

    tokens: int
    step: float
    read: int
    evaluation: float
    learnt: int
    rest: float
    peak: int | None


@dataclass(frozen=True)
class Course:
    """What a run is made of: steps of so many batches with so many padded tokens in the mean and at
    most, evaluations of so many padded tokens, and held-out tokens that are learnt."""

    steps: int
    batches: int
    tokens: float
    most_tokens: int
    evaluations: int
    read: int
    learnt: int

    @classmethod
    def of(cls, data: TrainingData, args: TrainingArguments) -> Course:
        """Of a run on these rows. Of a stream, whose lengths are not known, every row counts as its
        longest among the first ones."""
        batch, rows = args.per_device_train_batch_size, data.rows
        lengths_R = row_lengths(data.known_rows if data.is_stream else rows)
        longest, whole = int(lengths_R.max()), 0  # steps of an epoch, which no stream has
        if data.is_stream:
            steps, mean = args.max_steps, float(batch * longest)
        else:
            whole = math.ceil(len(rows) / (batch * args.gradient_accumulation_steps))
            steps = math.ceil(whole * args.num_train_epochs)
            drawn_R = np.random.default_rng(0).permutation(lengths_R)[:_DRAWN]
            mean = padded(drawn_R, batch) / math.ceil(len(drawn_R) / batch)
        steps = args.max_steps if args.max_steps > 0 else steps
        evaluations = 1  # of the best, in the end
        if args.eval_strategy == IntervalStrategy.STEPS:
            every = args.eval_steps or args.logging_steps  # below 1 a share
            evaluations += math.ceil(steps / max(every if every >= 1 else every * steps, 1))
        elif args.eval_strategy == IntervalStrategy.EPOCH:
            evaluations += math.ceil(steps / whole) if whole else 1
        held_R = row_lengths(data.held_out)
        return cls(
            steps,
            args.gradient_accumulation_steps,
            mean,
            min(batch, len(lengths_R)) * longest,
            evaluations,
            padded(held_R, args.per_device_eval_batch_size),
            data.held_out_facts.supervised_tokens,
        )


@dataclass(frozen=True)
class Forecast:
    """What a run takes here, in seconds and bytes, and from what steps of which sizes."""

    step: Line
    training: float
    evaluating: float
    rest: float
    memory: float | None
    measured: tuple[Measured, Measured]

    @property
    def seconds(self) -> float:
        """Of the whole run, of which the target's text is there."""
        return self.training + self.evaluating + self.rest


def forecast(small: Measured, large: Measured, course: Course) -> Forecast:
    """What a run takes by what two in miniature took."""
    step = Line.through((small.tokens, small.step), (large.tokens, large.step))
    evaluation = Line.through((small.read, small.evaluation), (large.read, large.evaluation))
    positions = [min(count, MAX_POSITIONS) for count in (small.learnt, large.learnt, course.learnt)]
    rest = Line.through((positions[0], small.rest), (positions[1], large.rest))
    memory = None
    if small.peak is not None and large.peak is not None:
        held = Line.through((small.tokens, small.peak), (large.tokens, large.peak))
        memory = held.at(course.most_tokens)
    return Forecast(
        step,
        course.steps * course.batches * step.at(course.tokens),
        course.evaluations * evaluation.at(course.read),
        rest.at(positions[2]),
        memory,
        (small, large),
    )


def rehearse(
    train: Callable[..., object], target: TargetModel, data: TrainingData, args: TrainingArguments
) -> tuple[Measured, Measured]:
    """Do a run in miniature twice, with half of a batch and with all of it; nothing is kept. Raises
    what such a run would: ValueError, or that the memory is full."""
    size = args.per_device_train_batch_size
    rows = data.rows if not data.is_stream else Dataset.from_list(list(islice(data.rows, size)))
    rows = _longest(rows, size)
    held = _longest(data.held_out, max(args.per_device_eval_batch_size, 2))
    surest = max(map(dict, data.held_out), key=_longest_run)  # there every head has a true token
    held = [surest, *(row for row in held if row != surest)][: len(held)]
    half = rows[: len(rows) // 2]
    if not half:
        half = [_second_half(rows[0])]
    less = held[: max(len(held) // 2, 1)]
    with _quiet():
        small = _measure(train, target, data, args, half, less)
        return small, _measure(train, target, data, args, rows, held)


def _second_half(row: dict[str, Any]) -> dict[str, Any]:
    """Of a row its second part, where answers stand; of a packed one the document that is cut in
    two begins there."""
    half = {name: value[len(value) // 2 :] for name, value in row.items()}
    if "position_ids" in half:
        positions = list(half["position_ids"])
        begun, ends = positions[0], [*positions, 0].index(0)
        half["position_ids"] = [place - begun for place in positions[:ends]] + positions[ends:]
    return half


def _measure(
    train: Callable[..., object],
    target: TargetModel,
    data: TrainingData,
    args: TrainingArguments,
    some: list[dict[str, Any]],
    some_held: list[dict[str, Any]],
) -> Measured:
    rows, held = Dataset.from_list(some), Dataset.from_list(some_held)
    short = copy.copy(args)
    short.max_steps, short.gradient_accumulation_steps = _STEPS, 1
    short.per_device_train_batch_size = len(rows)
    short.eval_strategy, short.save_strategy = IntervalStrategy.NO, SaveStrategy.NO
    short.load_best_model_at_end, short.disable_tqdm, short.report_to = False, True, []
    given = replace(data, rows=rows, held_out=held, warnings=())
    gc.collect()  # a run's parts know each other: the one before would be held still
    with tempfile.TemporaryDirectory() as folder:
        memory, began = PeakMemory(target.device), time.perf_counter()
        train(target, given, training_args=short, output_dir=folder)
        seconds, (peak, _) = time.perf_counter() - began, memory.read()
        figures = read_json(Path(folder) / METRICS_FILE)
    batch = args.per_device_eval_batch_size
    learnt = sum(label >= 0 for row in held["labels"] for label in row)
    rest = seconds - figures["train_runtime"] - figures["eval_runtime"]
    return Measured(
        padded(row_lengths(rows), len(rows)),
        figures["step_runtime"],
        padded(row_lengths(held), batch),
        figures["eval_runtime"],
        learnt,
        rest,
        peak,
    )


def padded(lengths_R: Any, batch: int) -> int:
    """Tokens of rows in batches of so many, in order, with what fills each up to its longest."""
    parts = [lengths_R[start : start + batch] for start in range(0, len(lengths_R), batch)]
    return sum(len(part) * int(part.max()) for part in parts)


def _longest(rows: Dataset, count: int) -> list[dict[str, Any]]:
    """Of those that anything is learnt of, which cost more, where there are such."""
    order_R = np.argsort(-row_lengths(rows), kind="stable")
    learnt = (row for place in order_R if _longest_run(row := dict(rows[int(place)])))
    return list(islice(learnt, count)) or [dict(rows[int(place)]) for place in order_R[:count]]


def _longest_run(row: dict[str, Any]) -> int:
    """Tokens in a row that are learnt, at most."""
    return int(np.diff(stretches(np.asarray(row["labels"]) != IGNORED)).max(initial=0))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a run says of itself is not this one's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def show_forecast(found: Forecast, course: Course, console: Console) -> None:
    """Print what was measured and what follows, one line a fact."""
    table = Table(title="Measured on this machine, in miniature", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    small, large = found.measured
    sizes = f"{small.tokens:,} tokens took {small.step:.3g} s, {large.tokens:,} {large.step:.3g} s"
    table.add_row("a batch", sizes)
    table.add_row("so a batch takes", f"{found.step.fixed:.3g} s + {found.step.each:.3g} s a token")
    if found.memory is not None:
        table.add_row("memory of a process, measured", byte_size(found.memory), end_section=True)
    batches = course.steps * course.batches
    batch = f"{course.tokens:,.0f} tokens"
    table.add_row("training", f"{duration(found.training)}: {batches:,} batches of {batch}")
    evaluated = f"{course.evaluations} evaluations of {course.read:,} tokens"
    table.add_row("evaluating", f"{duration(found.evaluating)}: {evaluated}")
    table.add_row("beginning and end", duration(found.rest), end_section=True)
    table.add_row("the run, about", duration(found.seconds))
    console.print(table)


def duration(seconds: float) -> str:
    """For example `3.4 h`."""
    for limit, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= limit:
            return f"{seconds / limit:.1f} {unit}"
    return f"{seconds:.1f} s"
