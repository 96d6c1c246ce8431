"""Training batch sizes that nobody chose: few rows a step where there is little text.

Heads learn more from little text in many small steps than in few large ones, for up to a fifth more
time on a CPU (docs/benchmarks/recipes.md, "Small steps"). Imports nothing heavy.
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


class Course(NamedTuple):
    """How the run that a checkpoint is of took its steps, as far as it tells.

    Attributes:
        batch_size: of each process.
        processes: that shared a step.
        rate: the peak learning rate.
    """

    batch_size: int | None = None
    processes: int = 1
    rate: float | None = None


def fit_batch(
    args: TrainingArguments,
    rows: int | None,
    learnt_of_row: float,
    before: Course | None = None,
) -> float:
    """Choose by the text a training batch size that is a default, as the learning rate is.

    Args:
        args: of the run.
        rows: of the text; None of a stream.
        learnt_of_row: tokens that are learnt of each, in the mean.
        before: of a run that is resumed, whose steps keep their rows.

    Returns:
        What share of the default learning rate suits steps that were made smaller: with the noise
        of their gradients it goes by the square root of the tokens that they learn from. 1 where
        nothing was chosen.
    """
    if not getattr(args, "rows_by_text", False):
        return 1.0
    # These are the rows of all processes where accelerate splits a batch among them.
    split = bool(getattr(args.accelerator_config, "split_batches", False))
    processes = 1 if split else args.world_size
    if before is not None and before.batch_size is not None:
        together = before.batch_size * (1 if split else before.processes)
        args.per_device_train_batch_size = math.ceil(together / processes)
        return 1.0
    by_width = getattr(args, "rates_by_width", False)
    if not (rows and by_width) or args.max_steps > 0:
        return 1.0
    together = args.gradient_accumulation_steps * processes
    usual = round(rows * args.num_train_epochs / USUAL_STEPS)
    least = math.ceil(LEAST_LEARNT / max(learnt_of_row, 1.0))
    size = min(math.ceil(max(usual, least) / together), MOST_ROWS)
    if split:
        size = math.ceil(size / args.world_size) * args.world_size
    args.per_device_train_batch_size = size
    learnt = max(size * together * learnt_of_row, LEAST_LEARNT)  # of fewer nothing is known
    return math.sqrt(min(learnt / TUNED_LEARNT, 1.0))
