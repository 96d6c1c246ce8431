"""Which rows are kept from training, to measure on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset


def hold_out(
    rows: Dataset, share: float, seed: int, count: int | None = None
) -> tuple[Dataset, Dataset]:
    """Split into rows to train on and rows to measure on, by document: a share, or a count of them.

    Without a column `document` each row is one; only where all rows are of one document are they
    drawn row by row.

    Raises:
        ValueError: there is only one row, or no more documents than are to be held out.
    """
    documents = np.arange(len(rows))
    if "document" in rows.column_names and len(set(rows["document"])) > 1:
        documents = np.asarray(rows["document"])
    known = np.unique(documents)
    if len(known) < 2:
        raise ValueError(
            "the corpus has a single row, so none can be held out: give more text or an "
            "eval_dataset"
        )
    if count is None:
        count = min(max(round(share * len(known)), 1), len(known) - 1)
    elif count >= len(known):
        raise ValueError(
            f"eval_rows {count} would hold out all {len(known)} documents: ask for fewer"
        )
    drawn = np.random.default_rng(seed).permutation(known)[:count]
    held = np.isin(documents, drawn)
    return rows.select(np.flatnonzero(~held)), rows.select(np.flatnonzero(held))
