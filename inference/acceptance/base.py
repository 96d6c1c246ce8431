"""The interface of acceptance rules, and the logits processors as each row of a batch meets them.

Shapes: B active rows, N tree nodes, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor
from transformers.generation import logits_process as known

from medusa_heads.inference.engine.given.own_code import row_copies
from medusa_heads.inference.engine.rows import Row
from medusa_heads.trees.tree import TokenTree

# Warpers look at the scores of one position alone: neither at the text nor at other rows.
_WARPERS = (
    known.EpsilonLogitsWarper, known.EtaLogitsWarper, known.MinPLogitsWarper,
    known.TemperatureLogitsWarper, known.TopKLogitsWarper, known.TopPLogitsWarper,
    known.TypicalLogitsWarper,
)  # fmt: skip

# These look at the row's own text as well, but neither at other rows nor at which row it is.
_OF_ONE_ROW = (
    *_WARPERS,
    known.ExponentialDecayLengthPenalty,
    known.ForcedBOSTokenLogitsProcessor,
    known.ForcedEOSTokenLogitsProcessor,
    known.InfNanRemoveLogitsProcessor,
    known.LogitNormalization,
    known.MinLengthLogitsProcessor,
    known.MinNewTokensLengthLogitsProcessor,
    known.NoBadWordsLogitsProcessor,
    known.NoRepeatNGramLogitsProcessor,
    known.RepetitionPenaltyLogitsProcessor,
    known.SequenceBiasLogitsProcessor,
    known.SuppressTokensAtBeginLogitsProcessor,
    known.SuppressTokensLogitsProcessor,
)


def look_at_scores_alone(processors: LogitsProcessorList) -> bool:
    """Whether the processors may be run on any scores, without the text before them."""
    return all(type(processor) in _WARPERS for processor in processors)


def look_at_tokens_alone(processors: LogitsProcessorList, rows: Sequence[Row]) -> bool:
    """Whether of these texts the processors look at most at which tokens are in them, in whatever
    order, and at all that are still to come."""
    penalties = [processor for processor in processors if is_penalty(processor)]
    others = LogitsProcessorList(each for each in processors if not is_penalty(each))
    if len(penalties) > 1 or not look_at_scores_alone(others):
        return False
    # The last token counts, from which trees go on.
    return all(ignored(each, row) < row.length for each in penalties for row in rows)


def leaves_all(processor: Any) -> bool:
    """Whether it changes no score: transformers makes one of `min_p=0` as well."""
    return type(processor) is known.MinPLogitsWarper and processor.min_p == 0


def is_penalty(processor: Any) -> bool:
    return type(processor) is known.RepetitionPenaltyLogitsProcessor


def ignored(penalty: Any, row: Row) -> int:
    """Tokens at the beginning of a text, its padding included, that a repetition penalty leaves
    out."""
    lengths: Tensor | int | None = penalty.prompt_ignore_length
    return max(int(lengths[row.index] if isinstance(lengths, Tensor) else lengths or 0), 0)


def warp(processors: LogitsProcessorList, ids_1T: Any, scores_RV: Tensor) -> Tensor:
    """What processors that look at scores alone make of any rows of them. The list itself, called,
    would ask each time what its processors take: half of what they cost on few scores."""
    for processor in processors:
        scores_RV = processor(ids_1T, scores_RV)
    return scores_RV


def look_at_one_row(processors: LogitsProcessorList) -> bool:
    """Whether the processors may be run on a single row, as if the batch had no other."""
    return all(
        type(processor) in _OF_ONE_ROW
        # Lengths of prompts to leave out, one for each row.
        and not isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
        for processor in processors
    )


def settings_of(processor: Any) -> tuple[type, str]:
    """By which processors are told apart that make other scores of the same."""
    settings = sorted(vars(processor).items())
    # The middle of a long tensor is left out where it is written as it is.
    whole = [(n, s.tolist() if isinstance(s, Tensor) else s) for n, s in settings]
    return type(processor), repr(whole)


def greediest(logits: Tensor) -> Tensor:
    """The likeliest tokens, along the last dimension. In fp32, as generate() compares them: of a
    target in double precision, unequal logits may be equal there."""
    logits = logits.float() if logits.dtype == torch.float64 else logits
    return logits.argmax(dim=-1)


Settings = Mapping[str, tuple[float, float]]  # of a rule: the default, and the most it may be


class AcceptanceRule(Protocol):
    """Walks the tree of every row with the target's logits. Commits each accepted token and one
    bonus token to its row, and returns the accepted nodes, node 0 first; none for a row that is
    done. A rule never sees a drafter."""

    lossless: bool

    def __call__(
        self, tree: TokenTree, logits_BNV: Tensor, rows: Sequence[Row]
    ) -> list[list[int]]: ...


@dataclass(frozen=True)
class RowProcessors:
    """Runs the processors for one row, as often and with the same text as generate() would."""

    row: int  # its place in the batch
    batch_size: int
    # The processors in order, each with whether it must see a whole batch: it may keep a setting or
    # a state for each row.
    steps: Sequence[tuple[Any, bool]]

    def __call__(self, ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
        """The processed scores, [1, V]; those given may be written over."""
        for processor, whole_batch in self.steps:
            if whole_batch:
                ids_BT = ids_1T.repeat(self.batch_size, 1)
                scores_BV = processor(ids_BT, scores_1V.repeat(self.batch_size, 1))
                scores_1V = scores_BV[self.row, None]
            else:
                scores_1V = processor(ids_1T, scores_1V)
        return scores_1V


def row_processors(processors: LogitsProcessorList, batch_size: int) -> list[RowProcessors]:
    """For each row of a batch. A processor with a method `of_row(row)` says itself what stands for
    it in a row, and is then shown that row alone. Raises ValueError: a processor that may keep a
    state, and cannot be copied for each row."""
    steps = []  # a processor for each row of the batch
    for processor in processors:
        if batch_size == 1 or look_at_one_row(LogitsProcessorList([processor])):
            steps.append([(processor, False)] * batch_size)
        elif type(processor) is PrefixConstrainedLogitsProcessor:
            steps.append([(_allowed_of_row(processor, row), False) for row in range(batch_size)])
        elif hasattr(processor, "of_row"):
            steps.append([(processor.of_row(row), False) for row in range(batch_size)])
        else:
            steps.append([(copy, True) for copy in row_copies(processor, batch_size)])
    return [
        RowProcessors(row, batch_size, [of_row[row] for of_row in steps])
        for row in range(batch_size)
    ]


def _allowed_of_row(
    processor: PrefixConstrainedLogitsProcessor, row: int
) -> PrefixConstrainedLogitsProcessor:
    """Asks the user's function about this row alone, which it may remember. It goes by the prompt,
    of which there may be several rows."""
    allowed, prompt = processor._prefix_allowed_tokens_fn, row // processor._num_beams
    return PrefixConstrainedLogitsProcessor(lambda _, ids_T: allowed(prompt, ids_T), num_beams=1)
