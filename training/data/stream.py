"""Corpora larger than memory: rows that are read, tokenised, mixed and packed while training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from datasets.iterable_dataset import RepeatExamplesIterable

from medusa_heads.data.sources import Corpus
from medusa_heads.training.data.columns import row_features, token_features
from medusa_heads.training.data.pack import pack_batch
from medusa_heads.training.data.tokeniser import Tokeniser

FIRST_ROWS = 256
"""So many rows of a stream are looked at before training."""

# Little enough that training starts at once; packing has the shuffle buffer's worth to choose from.
_TOKENISED_AT_ONCE = 64
_PACKED_AT_ONCE = 512


@dataclass
class _Sieve:
    """Lets rows through that can be used, and counts or refuses the others. Called with batches of
    what a Tokeniser makes. Held-out rows are known by their tokens: readers that share a stream
    have each a part of it, in which no row knows its place in the whole."""

    corpus: Corpus
    held_out: frozenset[bytes] = frozenset()

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        passed: dict[str, list[Any]] = {"input_ids": [], "labels": []}
        for row, problem in enumerate(batch["problem"]):
            if problem is not None:
                place = batch["place"][row] or self.corpus.place(batch["document"][row])
                self.corpus.bad_rows.add(place, problem)
            elif _digest(batch["input_ids"][row]) not in self.held_out:
                for name, column in passed.items():
                    column.append(batch[name][row])
        return passed


def stream_rows(
    corpus: Corpus,
    tokeniser: Tokeniser,
    *,
    held_out: int,
    shuffle_buffer: int,
    seed: int,
    packing: bool,
) -> tuple[IterableDataset, IterableDataset, IterableDataset, Dataset | None, Dataset]:
    """An endless stream of rows to train on; its first pass alone; one pass over its rows, in order
    and not packed; the rows of the first `held_out` documents, None if there are to be none; and
    the first rows of that pass. The stream begins anew when the corpus ends, mixed in another way.
    Read again from its start it gives the same rows in the same order, which is what resuming
    builds on. Raises ValueError: the corpus, or the first of its files where readers share them,
    holds nothing beyond the held-out documents.

    Args:
        held_out: documents at the start that are kept from it, with all of the same tokens.
        shuffle_buffer: rows mixed at a time, by the seed; 1 leaves the order.
        packing: join documents to rows of the tokeniser's `max_length`.
    """
    held, digests = None, frozenset[bytes]()
    if held_out:
        held = _table(_tokens(corpus.rows.take(held_out), tokeniser, _Sieve(corpus)))
        digests = frozenset(map(_digest, held["input_ids"]))
    rows = one_pass = _tokens(corpus.rows, tokeniser, _Sieve(corpus, digests))
    first = _table(rows.take(FIRST_ROWS))
    if not len(first) or (held is not None and not len(held)):
        raise ValueError(
            f"the stream has no text beyond its first {held_out} documents, which are held out: "
            "ask for fewer eval_rows, give an eval_dataset, or leave streaming off"
        )
    shards = rows.num_shards
    if shards > 1 and next(iter(rows.shard(shards, 0)), None) is None:
        # A process that were given only this one would wait for its first row for ever.
        raise ValueError(
            f"the first of the stream's {shards} files is held out whole: ask for fewer eval_rows, "
            "or give an eval_dataset"
        )
    make = partial(_pass, rows, seed, shuffle_buffer, tokeniser.max_length if packing else None)
    endless = make(0).repeat(None)
    if shuffle_buffer > 1:
        endless._ex_iterable = _Passes(endless._ex_iterable.ex_iterable, make)
    return endless, make(0), one_pass, held, first


def _pass(
    rows: IterableDataset, seed: int, shuffle_buffer: int, packed_to: int | None, number: int
) -> IterableDataset:
    """One pass over the rows, mixed by the seed and its number."""
    if shuffle_buffer > 1:
        rows = rows.shuffle(seed=seed + number, buffer_size=shuffle_buffer)
    if packed_to is not None:
        rows = rows.map(
            partial(pack_batch, max_length=packed_to),
            batched=True,
            batch_size=_PACKED_AT_ONCE,
            remove_columns=["input_ids", "labels"],
            features=row_features("position_ids"),
        )
    return rows


class _Passes(RepeatExamplesIterable):
    """Passes without end, each in an order of its own, which hangs on its number alone: `repeat` of
    datasets gives the same order again. All readers of a stream share each pass as they share the
    first one."""

    def __init__(
        self,
        first: Any,
        make: Callable[[int], IterableDataset],
        changes: tuple[tuple[str, dict[str, Any]], ...] = (),
    ) -> None:
        super().__init__(first, None)
        self._make = make
        self._changes = changes  # what became of the first pass, and is to become of all

    @property
    def iter_arrow(self) -> None:
        return None

    def _init_state_dict(self) -> dict[str, Any]:
        inner = self.ex_iterable._init_state_dict()
        self._state_dict = {"number": 0, "inner": inner, "type": type(self).__name__}
        return self._state_dict

    def __iter__(self) -> Iterator[Any]:
        state = self._state_dict or {"number": 0}
        rows = self._numbered(state["number"])
        if state["number"]:
            rows.load_state_dict(state["inner"])
            state["inner"] = rows._state_dict
        is_first = True
        while True:
            is_empty = True
            for row in rows:
                is_empty = False
                yield row
            if is_empty and not is_first:  # the first may have begun at its end
                return
            is_first = False
            state["number"] += 1
            rows = self._numbered(state["number"])
            state["inner"] = rows._init_state_dict()

    def _numbered(self, number: int) -> Any:
        if number == 0:
            return self.ex_iterable
        rows = self._make(number)._ex_iterable
        for name, given in self._changes:
            changed = deepcopy(given)
            if "generator" in given:  # earlier versions of datasets mix the rows by it, too
                drawn = int(changed["generator"].integers(1 << 62))
                changed["generator"] = np.random.default_rng([drawn, number])
            rows = getattr(rows, name)(**changed)
        return rows

    def _changed(self, name: str, **given: Any) -> _Passes:
        first = getattr(self.ex_iterable, name)(**deepcopy(given))
        return _Passes(first, self._make, (*self._changes, (name, given)))

    def shuffle_data_sources(self, generator: np.random.Generator) -> _Passes:
        return self._changed("shuffle_data_sources", generator=generator)

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> _Passes:
        given = {"num_shards": num_shards, "index": index, "contiguous": contiguous}
        return self._changed("shard_data_sources", **given)

    def reshard_data_sources(self) -> _Passes:
        return self._changed("reshard_data_sources")


def _tokens(rows: IterableDataset, tokeniser: Tokeniser, sieve: _Sieve) -> IterableDataset:
    features, kept = token_features(shown=False), row_features()
    batches: dict[str, Any] = {"batched": True, "batch_size": _TOKENISED_AT_ONCE}
    known = list(next(iter(rows), {}))
    tokens = rows.map(
        partial(_listed, tokeniser),
        with_indices=True,
        remove_columns=known,
        features=features,
        **batches,
    )
    return tokens.map(sieve, remove_columns=[*features.keys() - kept], features=kept, **batches)


def _listed(tokeniser: Tokeniser, batch: Any, documents: Sequence[int]) -> dict[str, list[Any]]:
    return tokeniser(batch, documents).to_pydict()


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=16).digest()


def _table(rows: IterableDataset) -> Dataset:
    found, kept = list(rows), row_features()
    return Dataset.from_dict({name: [row[name] for row in found] for name in kept}, features=kept)
