"""The logits processors as each row of a batch meets them.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor

from medusa_heads.inference.acceptance.base import look_at_one_row
from medusa_heads.inference.engine.row_copies import row_copies


class RowProcessors:
    """Runs the processors for one row, as often and with the same text as generate() would.

    Args:
        row: its place in the batch.
        batch_size: rows of the batch.
        steps: the processors in order, each with whether it must see a whole batch: it may keep a
            setting or a state for each row.
    """

    def __init__(self, row: int, batch_size: int, steps: list[tuple[Any, bool]]) -> None:
        self._row = row
        self._batch_size = batch_size
        self._steps = steps

    def __call__(self, ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
        """The processed scores, [1, V]; those given may be written over."""
        for processor, whole_batch in self._steps:
            if whole_batch:
                ids_BT = ids_1T.repeat(self._batch_size, 1)
                scores_BV = processor(ids_BT, scores_1V.repeat(self._batch_size, 1))
                scores_1V = scores_BV[self._row, None]
            else:
                scores_1V = processor(ids_1T, scores_1V)
        return scores_1V


def row_processors(processors: LogitsProcessorList, batch_size: int) -> list[RowProcessors]:
    """For each row of a batch.

    A processor with a method `of_row(row)` says itself what stands for it in a row, and is then
    shown that row alone.

    Raises:
        ValueError: a processor that may keep a state, and cannot be copied for each row.
    """
    steps_of_row: list[list[tuple[Any, bool]]] = [[] for _ in range(batch_size)]
    for processor in processors:
        if batch_size == 1 or look_at_one_row(LogitsProcessorList([processor])):
            made = [(processor, False)] * batch_size
        elif type(processor) is PrefixConstrainedLogitsProcessor:
            made = [(_allowed_of_row(processor, row), False) for row in range(batch_size)]
        elif hasattr(processor, "of_row"):
            made = [(processor.of_row(row), False) for row in range(batch_size)]
        else:
            made = [(copy, True) for copy in row_copies(processor, batch_size)]
        for steps, step in zip(steps_of_row, made, strict=True):
            steps.append(step)
    return [RowProcessors(row, batch_size, steps) for row, steps in enumerate(steps_of_row)]


def _allowed_of_row(
    processor: PrefixConstrainedLogitsProcessor, row: int
) -> PrefixConstrainedLogitsProcessor:
    """Asks the user's function about this row alone, which it may remember."""
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _, ids_T: allowed(row, ids_T), num_beams=1)
