"""Training batch sizes that nobody chose: few rows a step where there is little text.

Heads learn more from little text in many small steps than in few large ones, in about a fifth more
time on a CPU at most (docs/benchmarks/recipes.md, "Small steps"). Imports nothing heavy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import TrainingArguments

MOST_ROWS = 16
USUAL_STEPS = 1_000
"""That a run has where its text is enough for them, and not for more of MOST_ROWS."""

LEAST_LEARNT = 128
"""Tokens that a step learns from."""

TUNED_LEARNT = 1_024
"""Tokens of a step from which on the default learning rates suit."""


class StepsBefore(NamedTuple):
    """How the run that a checkpoint is of made its steps, as far as it tells."""

    batch_size: int | None = None  # of each process
    processes: int = 1  # that shared a step
    accumulated: int = 1  # batches of each that made a step
    split: bool = False  # a batch was that of all processes


def fit_batch(
    args: TrainingArguments,
    rows: int | None,
    learnt_of_row: float,
    before: StepsBefore | None = None,
) -> float:
    """Choose by the text a training batch size that is a default, as the learning rate is.

    Args:
        rows: of the text; None of a stream.
        learnt_of_row: tokens that are learnt of each, in the mean.
        before: of a run that is resumed, whose steps keep their rows, as far as each process takes
            no more of them than it did, or than MOST_ROWS.

    Returns:
        What share of the default learning rate suits steps that were made smaller: with the noise
        of their gradients it goes by the square root of the tokens that they learn from. 1 where
        nothing was chosen.
    """
    if not getattr(args, "rows_by_text", False):
        return 1.0
    multiple, processes = (args.world_size, 1) if _split(args) else (1, args.world_size)
    together = args.gradient_accumulation_steps * processes
    most = MOST_ROWS
    by_text = rows and getattr(args, "rates_by_width", False) and args.max_steps <= 0
    if before is not None and before.batch_size is not None:
        each, of_all = before.batch_size, 1 if before.split else before.processes
        wanted, most = each * of_all * before.accumulated, max(each, MOST_ROWS)
    elif rows and by_text:
        usual = round(rows * args.num_train_epochs / USUAL_STEPS)
        wanted = max(usual, math.ceil(LEAST_LEARNT / max(learnt_of_row, 1.0)))
    else:
        return 1.0
    size = math.ceil(min(math.ceil(wanted / together), most) / multiple) * multiple
    args.per_device_train_batch_size = size
    if not by_text:
        return 1.0
    learnt = max(size * together * learnt_of_row, LEAST_LEARNT)  # of fewer nothing is known
    return math.sqrt(min(learnt / TUNED_LEARNT, 1.0))


def check_filled(args: TrainingArguments, rows: int | None) -> None:
    """Raises ValueError: the rows do not fill a batch, and none is taken that is not full."""
    batch = rows_of_all(args)
    if args.dataloader_drop_last and rows is not None and rows < batch:
        raise ValueError(
            f"dataloader_drop_last leaves no batch: {rows} rows do not fill one of {batch}; lower "
            "per_device_train_batch_size, or give more text"
        )


def rows_of_all(args: TrainingArguments) -> int:
    """Rows of a training batch of all processes."""
    return args.train_batch_size * (1 if _split(args) else args.world_size)


def _split(args: TrainingArguments) -> bool:
    """Whether a batch is that of all processes, among whom accelerate splits it."""
    return bool(getattr(args.accelerator_config, "split_batches", False))
