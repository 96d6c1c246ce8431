"""What is known of rows before anything is trained on them: counts, and that they can be used.

Shapes: V vocabulary of the target.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.data.formats import LARGEST_TOKEN
from medusa_heads.data.sources import is_stream
from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.columns import ROWS_AT_ONCE, flat, seen_hashes, stretches

TOKENS_PER_ENTRY = 256
"""So many tokens of a stream are counted for each token that can be drafted."""

_LITTLE = 0.01
_SHARDS = 64


class UnfitRow(ValueError):
    """A row does not fit the target, told by its number among those that were checked."""


@dataclass(frozen=True)
class RowFacts:
    """What was counted while a dataset was checked."""

    rows: int
    tokens: int
    supervised_tokens: int
    sha256: str  # over the token ids and labels, row by row, and then over the images

    def doubt(self, name: str) -> str | None:
        """The sentence for a dataset of less than 1 % of whose tokens anything is learnt."""
        share = self.supervised_tokens / self.tokens
        if share >= _LITTLE:
            return None
        return (
            f"only {100 * share:.2f} % of the tokens in the {name} are supervised: look at what "
            "its labels leave out, or give text with longer answers"
        )


@dataclass(frozen=True)
class RowLimits:
    """What rows must fit: the target's vocabulary, and its context where it has a limit."""

    vocab_size: int
    context: int | None

    @classmethod
    def of(cls, target: TargetModel) -> RowLimits:
        return cls(target.vocab_size, target.max_positions)

    def fit(self, ids: tuple[Any, Any], labels: tuple[Any, Any]) -> bool:
        """Whether `problem` finds none in rows whose values and lengths these are."""
        (ids_T, lengths), (labels_T, label_lengths) = ids, labels
        return (
            bool(len(lengths) and lengths.min())
            and np.array_equal(lengths, label_lengths)
            and (self.context is None or lengths.max() <= self.context)
            and bool(ids_T.min() >= 0 and ids_T.max() < self.vocab_size)
            and not ((labels_T != ids_T) & (labels_T != IGNORED)).any()
        )

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


def whole_rows(table: pa.Table, max_length: int, limits: RowLimits | None) -> Any:
    """Which rows of tokens can be taken as they are, [rows] bool."""
    ids, labels = (table[name] for name in ("input_ids", "labels"))
    lengths, label_lengths = map(pc.list_value_length, (ids, labels))
    right = pc.and_(pc.greater(lengths, 0), pc.less_equal(lengths, max_length))
    right = pc.and_(right, pc.equal(lengths, label_lengths)).fill_null(False).combine_chunks()
    whole = right.to_numpy(zero_copy_only=False)
    places = np.flatnonzero(whole)
    (ids_T, lengths), (labels_T, _) = (flat(column.filter(right)) for column in (ids, labels))
    # Nulls have become NaN, which no comparison holds for.
    fine_T = (abs(ids_T) <= LARGEST_TOKEN) & (abs(labels_T) <= LARGEST_TOKEN)
    if limits is not None:
        fine_T &= (ids_T >= 0) & (ids_T < limits.vocab_size)
        fine_T &= (labels_T == ids_T) | (labels_T == IGNORED)
        if limits.context is not None:
            whole[places[lengths > limits.context]] = False
    rows = np.searchsorted(np.cumsum(lengths), np.flatnonzero(~fine_T), side="right")
    whole[places[rows]] = False
    return whole


def check_rows(
    rows: Dataset, target: TargetModel, *, name: str, heads_reached: int, kept: Any = None
) -> RowFacts:
    """Read every row (columns `input_ids` and `labels`) once, and count, or those alone that a mask
    [rows] keeps; `name` is what messages call the dataset. Raises ValueError: a row that does not
    fit the target's vocabulary and context, or too little supervised text: at one position
    somewhere `heads_reached` heads must have a true token."""
    limits = RowLimits.of(target)
    number = tokens = learnt = longest_run = first = 0
    digest = hashlib.sha256()
    tables = rows.select_columns(["input_ids", "labels"]).with_format("arrow").iter(ROWS_AT_ONCE)
    for table in tables:
        if kept is not None:
            first, mask = first + len(table), kept[first : first + len(table)]
            table = table if mask.all() else table.filter(pa.array(mask))
        if not len(table):
            continue
        columns = [flat(column) for column in table.columns]
        (ids, lengths), (labels, _) = columns
        if not limits.fit(*columns):
            parts = (np.split(values, np.cumsum(counts)[:-1]) for values, counts in columns)
            for place, (row_ids, row_labels) in enumerate(zip(*parts, strict=True), start=number):
                if (problem := limits.problem(row_ids, row_labels)) is not None:
                    raise UnfitRow(f"row {place} of the {name} {problem}")
        supervised = labels != IGNORED
        if longest_run < heads_reached + 1:  # all that need be known
            drafted = supervised.copy()
            drafted[np.cumsum(lengths) - lengths] = False  # no token before it to draft it from
            longest_run = max(longest_run, int(np.diff(stretches(drafted)).max(initial=0)))
        digest.update(_written(ids, labels, lengths))
        number += len(lengths)
        tokens += len(ids)
        learnt += int(np.count_nonzero(supervised))
    seen = seen_hashes(rows)
    digest.update((seen if kept is None or not len(seen) else seen[kept]).tobytes())
    if not learnt:
        raise ValueError(f"the {name} has no supervised token: every label is {IGNORED}")
    if longest_run < heads_reached + 1:
        raise ValueError(
            f"the {name} has no {heads_reached + 1} supervised tokens in a row behind the first "
            f"token of a text (at most {longest_run}): give longer text or fewer heads"
        )
    return RowFacts(number, tokens, learnt, digest.hexdigest())


def _written(ids: Any, labels: Any, lengths: Any) -> Any:
    """What is hashed, as int64: of each row its length, its token ids and its labels."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = 2 * (ends - lengths) + np.arange(len(lengths))
    written = np.empty(len(lengths) + 2 * len(ids), np.int64)
    written[starts] = lengths
    places = np.arange(len(ids)) + np.repeat(starts + 1 - (ends - lengths), lengths)
    written[places] = ids
    written[places + np.repeat(lengths, lengths)] = labels
    return written


def count_tokens(rows: Dataset | IterableDataset, vocab_size: int, most: int) -> Tensor:
    """How often each token is a label, [V] int64: those are worth drafting. Of one pass over a
    stream, about `most` labels are counted, from all over its files."""
    counts_V = np.zeros(vocab_size, np.int64)
    if is_stream(rows):
        # The same number of each part: files may be sorted, by language say.
        count = min(rows.num_shards, _SHARDS)
        parts, wanted = [rows.shard(count, index) for index in range(count)], most / count
    else:
        parts, wanted = [rows.select_columns(["labels"]).with_format("arrow")], math.inf
    for part in parts:
        left = wanted
        for batch in part.iter(64):
            found = batch["labels"]  # of a stream, lists
            labels = np.concatenate(found) if isinstance(found, list) else flat(found)[0]
            labels = labels[labels != IGNORED]
            counts_V += np.bincount(labels, minlength=vocab_size)
            left -= len(labels)
            if left <= 0:
                break
    return torch.from_numpy(counts_V)
