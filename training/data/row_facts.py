"""What is known of rows before anything is trained on them: counts, and that they can be used.

Shapes: V vocabulary of the target.
"""

from __future__ import annotations

import hashlib
import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.data.sources import is_stream
from medusa_heads.target.target import TargetModel

logger = logging.getLogger(__name__)

TOKENS_PER_ENTRY = 256
"""So many tokens of a stream are counted for each token that can be drafted."""

_LITTLE = 0.01
_SHARDS = 64


@dataclass(frozen=True)
class RowFacts:
    """What was counted while a dataset was checked."""

    rows: int
    tokens: int
    supervised_tokens: int
    sha256: str  # over the token ids and labels, row by row


@dataclass(frozen=True)
class RowLimits:
    """What rows must fit: the target's vocabulary, and its context where it has a limit."""

    vocab_size: int
    context: int | None

    @classmethod
    def of(cls, target: TargetModel) -> RowLimits:
        """The limits of a target."""
        return cls(target.vocab_size, target.max_positions)

    def problem(self, ids: Any, labels: Any) -> str | None:
        """Why training could not use a row (of arrays), None if it can: token ids outside the
        vocabulary, more tokens than the context, or labels that are shifted or of another length.
        """
        if not len(ids):
            return "is empty: leave it out"
        if len(ids) != len(labels):
            return f"has {len(ids)} input_ids but {len(labels)} labels"
        if self.context is not None and len(ids) > self.context:
            return (
                f"has {len(ids)} tokens, more than the target's context of {self.context}: "
                "cut it, or ask for shorter rows"
            )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            return (
                f"has token ids from {ids.min()} to {ids.max()}, the target's vocabulary has "
                f"{self.vocab_size}: tokenise with the target's own tokenizer"
            )
        if ((labels != ids) & (labels != IGNORED)).any():
            return (
                f"has labels that are neither {IGNORED} nor its input_ids at the same place: "
                "labels are not shifted here"
            )
        return None


def check_rows(rows: Dataset, target: TargetModel, *, name: str, heads_reached: int) -> RowFacts:
    """Read every row (columns `input_ids` and `labels`) once, and count; `name` is what messages
    call the dataset. Warns where less than 1 % of the tokens are supervised. Raises ValueError: a
    row that does not fit the target's vocabulary and context, or too little supervised text: at one
    position somewhere `heads_reached` heads must have a true token."""
    limits = RowLimits.of(target)
    number = tokens = learnt = longest_run = 0
    digest = hashlib.sha256()
    for batch in rows.select_columns(["input_ids", "labels"]).with_format("numpy").iter(256):
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            if (problem := limits.problem(ids, labels)) is not None:
                raise ValueError(f"row {number} of the {name} {problem}")
            supervised = labels != IGNORED
            longest_run = max(longest_run, _longest_run(supervised))
            for part in (len(ids), ids, labels):
                digest.update(np.asarray(part, np.int64).tobytes())
            number += 1
            tokens += len(ids)
            learnt += int(supervised.sum())
    if not learnt:
        raise ValueError(f"the {name} has no supervised token: every label is {IGNORED}")
    if longest_run < heads_reached + 1:
        raise ValueError(
            f"the {name} has no {heads_reached + 1} supervised tokens in a row "
            f"(at most {longest_run}): give longer text or fewer heads"
        )
    if learnt / tokens < _LITTLE:
        logger.warning(
            "only %.2f %% of the tokens in the %s are supervised: look at what its labels leave "
            "out, or give text with longer answers",
            100 * learnt / tokens,
            name,
        )
    return RowFacts(number, tokens, learnt, digest.hexdigest())


def _longest_run(mask: Any) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def count_tokens(rows: Dataset | IterableDataset, vocab_size: int, most: int) -> Tensor:
    """How often each token is a label, [V] int64: those are worth drafting. Of one pass over a
    stream, about `most` labels are counted, from all over its files."""
    counts_V = np.zeros(vocab_size, np.int64)
    if is_stream(rows):
        # The same number of each part: files may be sorted, by language say.
        count = min(rows.num_shards, _SHARDS)
        parts, wanted = [rows.shard(count, index) for index in range(count)], most / count
    else:
        parts, wanted = [rows.select_columns(["labels"]).with_format("numpy")], math.inf
    for part in parts:
        left = wanted
        for batch in part.iter(64):
            labels = np.concatenate([np.asarray(row, np.int64) for row in batch["labels"]])
            labels = labels[labels != IGNORED]
            counts_V += np.bincount(labels, minlength=vocab_size)
            left -= len(labels)
            if left <= 0:
                break
    return torch.from_numpy(counts_V)
