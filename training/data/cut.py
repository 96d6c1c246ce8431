"""No row longer than the longest: documents become several rows, answers are cut on the right."""

from __future__ import annotations

from typing import Any

import numpy as np

from medusa_heads.config import IGNORED
from medusa_heads.data.encoding import Ragged, ends_of
from medusa_heads.data.turns import LearntRows


def blocks(ids: Ragged, size: int) -> LearntRows:
    """Documents as rows of at most `size` tokens, learnt whole."""
    counts = -(-ids.lengths // size)
    sources = np.repeat(np.arange(len(counts)), counts)
    inside = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = Ragged(ids.values, np.append(ids.starts[sources] + size * inside, len(ids.values)))
    return LearntRows(rows, rows, sources)


def cut(rows: LearntRows, size: int, count: int) -> tuple[LearntRows, Any, dict[int, str]]:
    """Rows of at most `size` tokens, those left out in which nothing is learnt then; of each of
    `count` sources how many labels that cost; and why those have no row of which none is left."""
    ids, labels, sources = rows
    learnt = ends_of(labels.values != IGNORED)
    lengths = np.minimum(ids.lengths, size)
    stops = ids.starts + lengths
    kept = learnt[stops] > learnt[ids.starts]
    cost = np.bincount(sources, learnt[ids.offsets[1:]] - learnt[stops], count).astype(np.int64)
    shortest = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(shortest, sources, ids.lengths)
    problems = {
        int(source): f"of its {shortest[source]} tokens no answer is left within max_length {size}"
        for source in np.setdiff1d(sources, sources[kept])
    }
    cost[list(problems)] = 0
    if kept.all() and (lengths == ids.lengths).all():
        return rows, cost, problems
    starts, lengths = ids.starts[kept], lengths[kept]
    return (
        LearntRows(ids.part(starts, lengths), labels.part(starts, lengths), sources[kept]),
        cost,
        problems,
    )
