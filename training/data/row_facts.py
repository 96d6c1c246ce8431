"""What is known of rows before anything is trained on them: counts, and that they can be used."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from medusa_heads.config import IGNORED
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

_LITTLE = 0.01


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
    """Read every row once and refuse what training could not use.

    Warns where less than 1 % of the tokens are supervised.

    Args:
        rows: columns `input_ids` and `labels`.
        target: whose vocabulary and context the rows must fit.
        name: what the messages call the dataset.
        heads_reached: how many heads must have a true token at one position somewhere.

    Raises:
        ValueError: a row that training could not use, or too little supervised text.
    """
    limits = RowLimits.of(target)
    facts = {"rows": 0, "tokens": 0, "supervised_tokens": 0}
    digest = hashlib.sha256()
    longest_run = 0
    for batch in rows.select_columns(["input_ids", "labels"]).with_format("numpy").iter(256):
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            if (problem := limits.problem(ids, labels)) is not None:
                raise ValueError(f"row {facts['rows']} of the {name} {problem}")
            supervised = labels != IGNORED
            longest_run = max(longest_run, _longest_run(supervised))
            digest.update(np.int64(len(ids)).tobytes())
            digest.update(np.asarray(ids, np.int64).tobytes())
            digest.update(np.asarray(labels, np.int64).tobytes())
            facts["rows"] += 1
            facts["tokens"] += len(ids)
            facts["supervised_tokens"] += int(supervised.sum())
    if not facts["supervised_tokens"]:
        raise ValueError(f"the {name} has no supervised token: every label is {IGNORED}")
    if longest_run < heads_reached + 1:
        raise ValueError(
            f"the {name} has no {heads_reached + 1} supervised tokens in a row "
            f"(at most {longest_run}): give longer text or fewer heads"
        )
    share = facts["supervised_tokens"] / facts["tokens"]
    if share < _LITTLE:
        logger.warning(
            "only %.2f %% of the tokens in the %s are supervised: look at what its labels leave "
            "out, or give text with longer answers",
            100 * share,
            name,
        )
    return RowFacts(**facts, sha256=digest.hexdigest())


def _longest_run(mask: Any) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return int((edges[1::2] - edges[::2]).max(initial=0))
