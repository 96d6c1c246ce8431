"""How much of the demo fits into its time: the text to learn from, the prompts to measure on.

Both shrink together from what a fast machine takes to a floor, below which the heads would be poor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BUDGET = 300.0  # seconds of both stages
ROWS_A_STEP = 16  # amounts of text are multiples of it

# What a method takes for a text, in times of plain decoding's, on the average of the demo's.
_TIMES_PLAIN = 0.75
_EVALUATED = 0.3  # of the seconds of learning from a row
# The rest, mostly Python's own work, on the machine where a text took so many seconds; by the
# faster dtype, since of a slow one the products are slow.
_USUAL_TEXT = 0.6
_REST_OF_TRAINING = 25.0
_REST_OF_MEASURING = 12.0
_COMPILING = 15.0


@dataclass(frozen=True)
class Speeds:
    """Seconds on this machine, as short trials of the demo's parts took them.

    Attributes:
        row_written: one process continues one prompt, while the others write, too.
        row_read: the target reads one row, once for all passes.
        row_learnt: the heads learn from one row.
        text: plain decoding writes one of the benchmark's texts, by dtype.
    """

    row_written: float
    row_read: float
    row_learnt: float
    text: Mapping[str, float]


@dataclass(frozen=True)
class Amounts:
    """How much there is to do.

    Attributes:
        rows: pieces of text that the heads learn from.
        prompts: that are measured on.
    """

    rows: int
    prompts: int


FULL = Amounts(rows=3072, prompts=20)
FLOOR = Amounts(rows=512, prompts=8)


@dataclass(frozen=True)
class Work:
    """What is done with the amounts.

    Attributes:
        epochs: passes over the text.
        eval_rows: pieces of held-out text, evaluated after every pass and at the end.
        writers: processes that write text.
        runs: texts that are decoded of every prompt, by dtype.
        compiles: graphs that are compiled.
    """

    epochs: float
    eval_rows: int
    writers: int
    runs: Mapping[str, int]
    compiles: int


@dataclass(frozen=True)
class Plan:
    """What the demo does here.

    Attributes:
        amounts: of text and of prompts.
        train_seconds, measure_seconds: expected of the stages.
        prompt_seconds: of the latter, those of each prompt.
    """

    amounts: Amounts
    train_seconds: float
    measure_seconds: float
    prompt_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Of both stages."""
        return self.train_seconds + self.measure_seconds

    def after_training(self, took: float, *, budget: float, least: int) -> Plan:
        """With fewer prompts, where training took longer than expected: measuring, which is then
        expected to do so as well, is to end within the budget.

        Args:
            took: seconds.
            budget: seconds of both stages.
            least: prompts, whatever they take.
        """
        slower = max(took / self.train_seconds, 1.0)
        prompts, of_each = self.amounts.prompts, slower * self.prompt_seconds
        over = took + slower * self.measure_seconds - budget
        if slower > 1.0 and over > 0.0 and of_each > 0.0:
            prompts = max(prompts - math.ceil(over / of_each), min(least, prompts))
        fewer = self.amounts.prompts - prompts
        measuring = slower * self.measure_seconds - fewer * of_each
        return Plan(Amounts(self.amounts.rows, prompts), took, measuring, of_each)


def make_plan(
    speeds: Speeds,
    work: Work,
    *,
    full: Amounts = FULL,
    floor: Amounts = FLOOR,
    budget: float = BUDGET,
) -> Plan:
    """The largest share of the full amounts that fits the budget, and never less than the floor.

    Args:
        speeds: of this machine.
        work: what is done with the amounts.
        full: what is enough.
        floor: what is needed, whatever it takes.
        budget: seconds.
    """
    most, least = (_planned(amounts, speeds, work) for amounts in (full, floor))
    if most.seconds <= budget:
        return most
    if least.seconds >= budget:
        return least
    share = (budget - least.seconds) / (most.seconds - least.seconds)
    rows = floor.rows + share * (full.rows - floor.rows)
    prompts = floor.prompts + share * (full.prompts - floor.prompts)
    whole_steps = max(int(rows) // ROWS_A_STEP * ROWS_A_STEP, floor.rows)
    return _planned(Amounts(whole_steps, int(prompts)), speeds, work)


def _planned(amounts: Amounts, speeds: Speeds, work: Work) -> Plan:
    slowness = min(speeds.text.values()) / _USUAL_TEXT
    rows = amounts.rows + work.eval_rows
    written, read = rows * speeds.row_written / work.writers, rows * speeds.row_read
    learnt = amounts.rows * work.epochs * speeds.row_learnt
    evaluated = work.eval_rows * (work.epochs + 1) * speeds.row_learnt * _EVALUATED
    decoded = sum(runs * speeds.text[dtype] for dtype, runs in work.runs.items())
    of_prompt = decoded * _TIMES_PLAIN
    rest = _REST_OF_MEASURING + work.compiles * _COMPILING
    return Plan(
        amounts,
        train_seconds=written + read + learnt + evaluated + slowness * _REST_OF_TRAINING,
        measure_seconds=amounts.prompts * of_prompt + slowness * rest,
        prompt_seconds=of_prompt,
    )


def from_plain(values: Mapping[str, Any] | None) -> Speeds | None:
    """Speeds as `asdict` gave them; None where these are none."""
    try:
        speeds = Speeds(**(values or {}))
        rows = [speeds.row_written, speeds.row_read, speeds.row_learnt]
        seconds = [*rows, *speeds.text.values()]
        return speeds if all(0 < each < float("inf") for each in seconds) else None
    except (TypeError, AttributeError):
        return None


def in_words(seconds: float) -> str:
    """For example `40 seconds` or `3 minutes`; half minutes are told apart below five."""
    if seconds < 75:
        return f"{max(round(seconds / 5) * 5, 5)} seconds"
    halves = round(seconds / 30)
    if halves % 2 == 0 or seconds >= 300:
        return f"{round(seconds / 60)} minutes"
    return f"{halves / 2:g} minutes"
