"""Which tokens of many conversations their assistants wrote, found in all of them together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from medusa_heads.config import IGNORED
from medusa_heads.data.encoding import Ragged, begins, ends_of, places


class LearntRows(NamedTuple):
    """Rows of tokens, and what each is a part of."""

    input_ids: Ragged
    labels: Ragged  # as long, unshifted, -100 where the text was not generated
    sources: Any  # [rows] int64, ascending: which text or conversation each is a part of

    @classmethod
    def joined(cls, parts: Sequence[LearntRows]) -> LearntRows:
        """The rows of all parts, in the order of their sources."""
        ids, labels = (Ragged.joined([part[which] for part in parts]) for which in (0, 1))
        sources = np.concatenate([np.empty(0, np.int64), *(part.sources for part in parts)])
        order = np.argsort(sources, kind="stable")
        if len(parts) < 2 or np.array_equal(order, np.arange(len(order))):
            return cls(ids, labels, sources)
        return cls(ids.take(order), labels.take(order), sources[order])

    def of(self, numbers: Any) -> LearntRows:
        """The same rows of sources with other numbers, [sources]."""
        return self._replace(sources=numbers[self.sources])


def end_of_turns(
    ids: Ragged,
    starts: Any,
    stop_ids: Collection[int],
    special: Collection[int],
    is_blank: Callable[[int], bool],
) -> Any:
    """How many tokens of each row are its own, where an assistant's turn begins at `starts`, [rows]
    both: up to the first token that ends a turn, among the special tokens and white space at the
    end. Without any the turn ends where its text does."""
    lengths = ids.lengths
    tails, at_end = lengths.copy(), np.flatnonzero(lengths > starts)
    while len(at_end):  # once for each token of the longest such end
        last, which = np.unique(
            ids.values[ids.starts[at_end] + tails[at_end] - 1], return_inverse=True
        )
        quiet = [token in special or is_blank(token) for token in last.tolist()]
        at_end = at_end[np.array(quiet)[which]]
        tails[at_end] -= 1
        at_end = at_end[tails[at_end] > starts[at_end]]
    after = ids.part(ids.starts + tails, lengths - tails)
    rows = np.repeat(np.arange(len(lengths)), after.lengths)
    ends, found = lengths.copy(), np.zeros(len(lengths), bool)
    for wanted in (stop_ids, special):
        hits = np.flatnonzero(np.isin(after.values, np.fromiter(wanted, np.int64, len(wanted))))
        named, firsts = np.unique(rows[hits], return_index=True)
        ends_here = tails[named] + hits[firsts] - after.starts[named] + 1
        fresh = ~found[named]
        ends[named[fresh]], found[named] = ends_here[fresh], True
    return ends


def rows_of_turns(
    ids: Ragged, starts: Any, ends: Any, sources: Any, stop_ids: Collection[int]
) -> LearntRows:
    """Rows that hold each turn behind the context which it answers: as few as have each turn's
    tokens at their beginning. A turn is the first `ends` tokens of a row of `ids`, of which its
    assistant wrote those from `starts` on; turns of one source stand one after the other. Where a
    turn runs to the end of its text without one of `stop_ids`, and the next message opens with one,
    that ended it and is learnt, too."""
    left = np.arange(len(sources))
    leader = np.empty(len(sources), np.int64)  # the last turn of the row that each turn is in
    while len(left):
        _, first = np.unique(sources[left], return_index=True)
        lasts = left[np.append(first[1:], len(left)) - 1]
        leads = np.repeat(lasts, np.diff(np.append(first, len(left))))
        held = begins(
            (ids.values, ids.starts[left], ends[left]), (ids.values, ids.starts[leads], ends[leads])
        )
        leader[left[held]] = leads[held]
        left = left[~held]
    chosen, row = np.unique(leader, return_inverse=True)
    rows = ids.part(ids.starts[chosen], ends[chosen])
    stops = np.fromiter(stop_ids, np.int64, len(stop_ids))
    open_ = (ends == ids.lengths) & ~np.isin(ids.values[ids.starts + ends - 1], stops)
    open_ &= ends < rows.lengths[row]
    open_[open_] = np.isin(rows.values[(rows.starts[row] + ends)[open_]], stops)
    ends = ends + open_
    edges = np.zeros(len(rows.values) + 1, np.int32)
    np.add.at(edges, rows.starts[row] + starts, 1)
    np.add.at(edges, rows.starts[row] + ends, -1)
    return LearntRows(
        rows, labelled(rows, np.cumsum(edges[:-1], dtype=np.int32) > 0), sources[chosen]
    )


def labelled(ids: Ragged, is_learnt: Any) -> Ragged:
    """Labels of rows of tokens, of which a mask [tokens] says what is learnt."""
    return Ragged(np.where(is_learnt, ids.values, np.int32(IGNORED)), ids.offsets)


def replaced(ids: Ragged, others: Sequence[tuple[int, list[int]]]) -> Ragged:
    """The same rows, those of the given numbers with other tokens."""
    if not others:
        return ids
    extra = Ragged.of([tokens for _, tokens in others])
    starts, lengths = ids.starts.copy(), ids.lengths
    numbers = [number for number, _ in others]
    starts[numbers], lengths[numbers] = extra.starts + len(ids.values), extra.lengths
    values = np.concatenate([ids.values, extra.values])
    return Ragged(values[places(starts, lengths)], ends_of(lengths))
