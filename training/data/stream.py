"""Corpora larger than memory: rows that are read, tokenised, mixed and packed while training."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from medusa_heads.data.sources import Corpus
from medusa_heads.training.data.pack import pack_batch
from medusa_heads.training.data.tokeniser import Tokeniser, row_features, token_features

FIRST_ROWS = 256
"""So many rows of a stream are looked at before training."""

# Little enough that training starts at once; packing has the shuffle buffer's worth to choose from.
_TOKENISED_AT_ONCE = 64
_PACKED_AT_ONCE = 512


@dataclass
class _Sieve:
    """Lets rows through that can be used, and counts or refuses the others.

    Called with batches of what a Tokeniser makes. Held-out rows are known by their tokens: readers
    that share a stream have each a part of it, in which no row knows its place in the whole.
    """

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
) -> tuple[IterableDataset, IterableDataset, Dataset | None, Dataset]:
    """An endless stream of rows to train on; one pass over its rows, in order and not packed; the
    rows of the first `held_out` documents, None if there are to be none; and the first rows of that
    pass. The stream begins anew when the corpus ends. Read again from its start it gives the same
    rows in the same order, which is what resuming builds on. Raises ValueError: the corpus, or the
    first of its files where readers share them, holds nothing beyond the held-out documents.

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
    if shuffle_buffer > 1:
        rows = rows.shuffle(seed=seed, buffer_size=shuffle_buffer)
    if packing:
        rows = rows.map(
            partial(pack_batch, max_length=tokeniser.max_length),
            batched=True,
            batch_size=_PACKED_AT_ONCE,
            remove_columns=["input_ids", "labels"],
            features=row_features("position_ids"),
        )
    return rows.repeat(None), one_pass, held, first


def _tokens(rows: IterableDataset, tokeniser: Tokeniser, sieve: _Sieve) -> IterableDataset:
    features, kept = token_features(), row_features()
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
