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
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from medusa_heads.inference.row import Row
from medusa_heads.tree import TokenTree

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


def looks_at_one_row(processors: LogitsProcessorList) -> bool:
    """Whether running the processors on a single position's scores changes nothing."""
    return all(type(processor) in _WARPERS for processor in processors)


class AcceptanceRule(Protocol):
    """Walks the tree of every row with the target's logits.

    Commits each accepted token and one bonus token to its row, and returns the accepted nodes, node
    0 first; none for a row that is done. A rule never sees a drafter.
    """

    lossless: bool

    def __call__(
        self, tree: TokenTree, logits_BNV: Tensor, rows: Sequence[Row]
    ) -> list[list[int]]: ...
