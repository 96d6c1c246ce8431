"""The interface of acceptance rules: which path of a verified tree is kept.

Shapes: B active rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from medusa_heads.inference.engine.rows import Row
from medusa_heads.trees.tree import TokenTree

# Warpers look at the scores of one position alone: neither at the text nor at other rows.
_WARPERS = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

# These look at the row's own text as well, but neither at other rows nor at which row it is.
_OF_ONE_ROW = (
    *_WARPERS,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)


def look_at_scores_alone(processors: LogitsProcessorList) -> bool:
    """Whether the processors may be run on any scores, without the text before them."""
    return all(type(processor) in _WARPERS for processor in processors)


def look_at_one_row(processors: LogitsProcessorList) -> bool:
    """Whether the processors may be run on a single row, as if the batch had no other."""
    return all(
        type(processor) in _OF_ONE_ROW
        # Lengths of prompts to leave out, one for each row.
        and not isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
        for processor in processors
    )


class AcceptanceRule(Protocol):
    """Walks the tree of every row with the target's logits.

    Commits each accepted token and one bonus token to its row, and returns the accepted nodes, node
    0 first; none for a row that is done. A rule never sees a drafter.
    """

    lossless: bool

    def __call__(
        self, tree: TokenTree, logits_BNV: Tensor, rows: Sequence[Row]
    ) -> list[list[int]]: ...
