"""Training batch sizes that nobody chose: few rows a step where there is little text.

Heads learn more from little text in many small steps than in few large ones, for about the same
time on a CPU (docs/benchmarks/recipes.md, "Small steps"). Imports nothing heavy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainingArguments

MOST_ROWS = 16
USUAL_STEPS = 1_000
"""That a run has where its text is enough for them, and not for more of MOST_ROWS."""

LEAST_LEARNT = 128
"""Tokens that a step learns from."""

TUNED_LEARNT = 1_024
"""Tokens of a step from which on the default learning rates suit."""


def fit_batch(
    args: TrainingArguments, rows: int | None, learnt_of_row: float, before: int | None = None
) -> None:
    """Choose a default training batch size by the text.

    Args:
        args: of the run.
        rows: of the text; None of a stream.
        learnt_of_row: tokens that are learnt of each, in the mean.
        before: the batch size of each process in a run that is resumed, which is kept.
    """
    if not getattr(args, "rows_by_text", False):
        return
    if before is not None:
        args.per_device_train_batch_size = before
    elif rows and args.max_steps <= 0:
        together = args.gradient_accumulation_steps * args.world_size
        usual = round(rows * args.num_train_epochs / USUAL_STEPS)
        least = math.ceil(LEAST_LEARNT / max(learnt_of_row, 1.0))
        each = math.ceil(max(usual, least) / together)
        args.per_device_train_batch_size = min(each, MOST_ROWS)


def rate_share(args: TrainingArguments, learnt_of_row: float) -> float:
    """What share of a default learning rate suits steps of this run: with the noise of their
    gradients it goes by the square root of the tokens that they learn from. Of fewer than
    LEAST_LEARNT nothing is known."""
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return math.sqrt(min(max(rows * learnt_of_row, LEAST_LEARNT), TUNED_LEARNT) / TUNED_LEARNT)
