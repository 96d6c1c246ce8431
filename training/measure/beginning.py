"""What fresh heads begin with, by what is measured on some text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import Any

from accelerate.utils import send_to_device
from datasets import Dataset
from torch import Tensor
from transformers import TrainingArguments

from medusa_heads.heads import DecoderHeads, DraftHeads
from medusa_heads.training.arguments.batch import rows_of_all
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.hidden.states import DrawnOrder, HiddenStates
from medusa_heads.training.loss.least_squares import (
    FEWEST_ROWS_A_COLUMN,
    ROWS_A_COLUMN,
    begins_with_least_squares,
    columns,
    fit_linear,
)

FITTED_SHARE = 0.25
"""Of the rows that a run reads in all its passes, those by which fresh heads are fitted before."""


def scale_fresh(
    heads: DraftHeads, hidden_states: HiddenStates, text: Dataset, batch_size: int
) -> None:
    """Let fresh heads whose output is normalised be as sure as the target, by the first row of a
    text, read in the batch in which an evaluation reads it: in others it rounds differently."""
    if isinstance(heads, DecoderHeads):
        rows = [text[place] for place in range(min(batch_size, len(text)))]
        some = send_to_device(hidden_states.collate(rows), hidden_states.target.device)
        heads.scale_to(hidden_states.of(some)[:1, : len(rows[0]["input_ids"])])


def fit_fresh(
    heads: DraftHeads, hidden_states: HiddenStates, data: TrainingData, args: TrainingArguments
) -> int:
    """Let fresh heads begin with least squares, by some of the rows that they will learn from, of
    which each process reads as many; by how many positions."""
    if not begins_with_least_squares(heads):
        return 0
    rows: Any = data.rows
    (count, learnt_of_row), needed = data.rows_and_learnt(), columns(heads)
    passed = args.num_train_epochs * (count or 0)
    if args.max_steps > 0:
        passed = args.max_steps * args.gradient_accumulation_steps * rows_of_all(args)
    most = min(FITTED_SHARE * passed, ROWS_A_COLUMN * needed / learnt_of_row, count or math.inf)
    if most * learnt_of_row < FEWEST_ROWS_A_COLUMN * needed:
        return 0
    # In the batches of the first pass, which a cache was written in: others round differently.
    size, seed = args.train_batch_size, args.seed if args.data_seed is None else args.data_seed
    order = None if count is None else DrawnOrder(count, seed)
    # A stream's, too: the same text again is no further text, and half of it holds out no other.
    once: Any = data.first_pass if order is None else order
    some = iter(once)

    def batches() -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        for _ in range(math.ceil(most / (size * args.world_size))):
            batch = list(islice(some, size * args.world_size))
            if not batch:  # a stream's rows are fewer than the run will read
                return
            each = math.ceil(len(batch) / args.world_size)
            # The last: all processes read, and no row twice but for that.
            batch += islice(cycle(once), each * args.world_size - len(batch))
            own = batch[each * args.process_index : each * (args.process_index + 1)]
            taken = own if order is None else [rows[place] for place in own]
            inputs = send_to_device(hidden_states.collate(taken), hidden_states.target.device)
            yield hidden_states.of_step(inputs), inputs

    return fit_linear(heads, batches())
