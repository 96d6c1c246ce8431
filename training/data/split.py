"""Rows of tokens on disk, and which of them are learnt from: each made once (see `prepared.py`)."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from medusa_heads.config import IGNORED
from medusa_heads.data.formats import DOCUMENT_COLUMN, MASK_COLUMN, PADDED_LEARNT, PADDED_LEFT
from medusa_heads.data.sources import Corpus
from medusa_heads.files import move_in, read_json, replace_json, staging
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.data import EVAL_ROWS, EVAL_SHARE, DataArguments
from medusa_heads.training.data.columns import (
    ROWS_AT_ONCE,
    flat,
    picked,
    row_columns,
    row_digests,
    row_lengths,
    seen_hashes,
    write_numbers,
    write_table,
)
from medusa_heads.training.data.pack import fill_bins, pack_rows
from medusa_heads.training.data.prepared import prepared, prepared_folder, table_fingerprint
from medusa_heads.training.data.row_facts import RowFacts, RowLimits, check_rows
from medusa_heads.training.data.tokenise import document_numbers, is_ready, tokenise
from medusa_heads.training.data.tokeniser import Tokeniser

TRAINING = "training set"
"""What messages call the rows that are learnt from."""


def tokenise_once(
    corpus: Corpus, tokeniser: Tokeniser, settings: DataArguments
) -> tuple[Corpus, str]:
    """`tokenise`, on disk, unless the rows can be taken as they came; and a hash of what they hang
    on. Raises ValueError: padding of token rows would be read, or learnt, as text."""
    _check_padding(corpus)
    fingerprint = table_fingerprint(corpus.rows)
    if is_ready(corpus, tokeniser):
        rows = corpus.rows.select_columns(["input_ids", "labels"])
        return replace(corpus, rows=rows), fingerprint
    folder = prepared_folder(settings.prepared_dir, fingerprint, tokeniser, corpus.bad_rows.policy)
    with prepared(folder):
        return tokenise(corpus, tokeniser, settings.dataset_num_proc, folder), folder.name


def _check_padding(corpus: Corpus) -> None:
    """Padding is known by its mask alone, which nothing reads behind this."""
    names, number = [MASK_COLUMN, "labels"], 0
    if corpus.format.name != "tokens" or MASK_COLUMN not in corpus.rows.column_names:
        return
    for table in corpus.rows.select_columns(names).with_format("arrow").iter(100 * ROWS_AT_ONCE):
        if not all(map(pa.types.is_nested, table.schema.types)):  # which is told of as broken rows
            return
        lengths, others = (pc.list_value_length(table[name]) for name in names)
        fits = pc.equal(lengths, others).fill_null(False)  # of the others it is told elsewhere
        (masks, lengths), (labels, _) = (flat(table[name].filter(fits)) for name in names)
        ends, hidden = np.cumsum(lengths), masks == 0
        leading = np.isin(np.flatnonzero(hidden), (ends - lengths)[lengths > 0])
        reasons = {
            PADDED_LEFT: np.flatnonzero(hidden)[leading],
            PADDED_LEARNT: np.flatnonzero(hidden & (labels != IGNORED)),
        }
        for reason, found in reasons.items():
            if len(found):
                row = int(np.searchsorted(ends, found[0], side="right"))
                place = number + int(np.flatnonzero(fits.to_numpy())[row])
                raise ValueError(f"{corpus.place(place)}: {reason}")
        number += len(table)


def split_once(
    corpus: Corpus,
    tokenised: tuple[Corpus, str],
    target: TargetModel,
    settings: DataArguments,
    seed: int,
    *,
    draws: bool,
) -> tuple[Dataset, Dataset, Dataset | None, RowFacts]:
    """Of rows of tokens those to learn from, perhaps packed; the same before packing; those held
    out, None unless they are drawn here; and the facts of the former."""
    rows, fingerprint = tokenised[0].rows, tokenised[1]
    share, count, size = settings.eval_share, settings.eval_rows, settings.max_length
    drawn = [seed, share, count, EVAL_SHARE, EVAL_ROWS] if draws else None
    hangs_on = fingerprint, RowLimits.of(target), drawn, settings.packing and size
    folder = prepared_folder(settings.prepared_dir, *hangs_on)
    with prepared(folder) as found:
        if not found:
            kept = np.ones(len(rows), bool)
            if draws:
                documents = distinct_documents(document_numbers(corpus, rows), rows)
                kept[held_out_rows(documents, share, seed, count)] = False
            facts = check_rows(rows, target, name=TRAINING, heads_reached=1, kept=kept)
            with staging(folder) as made:
                replace_json(made / "facts.json", asdict(facts))
                if draws:
                    write_numbers(made / "known.arrow", rows, np.flatnonzero(kept))
                    write_numbers(made / "held_out.arrow", rows, np.flatnonzero(~kept))
                if settings.packing:
                    write_table(made / "bins.arrow", fill_bins(row_lengths(rows)[kept], size))
                move_in(made, folder, sorted(path.name for path in made.iterdir()))
    facts = RowFacts(**read_json(folder / "facts.json"))
    rows = row_columns(rows)
    known = picked(rows, folder / "known.arrow") if draws else rows
    measured = picked(rows, folder / "held_out.arrow") if draws else None
    if not settings.packing:
        return known, known, measured, facts
    bins = Dataset.from_file(str(folder / "bins.arrow"))
    return pack_rows(known, bins), known, measured, facts


def hold_out(
    rows: Dataset, share: float | None, seed: int, count: int | None = None
) -> tuple[Dataset, Dataset]:
    """Split into rows to train on and rows to measure on, by document: a share, or a count of them,
    or by default EVAL_SHARE, and at most EVAL_ROWS. Equal documents are on the same side.

    Without a column `document`, or where all rows are of one, each row is a document. One with more
    rows than all others together is learnt from, whichever are drawn. Raises ValueError where there
    is only one row, or no more documents than are to be held out.
    """
    documents = np.arange(len(rows))
    if DOCUMENT_COLUMN in rows.column_names:
        documents = rows.with_format("numpy")[DOCUMENT_COLUMN][:]
    held = held_out_rows(distinct_documents(documents, rows), share, seed, count)
    return rows.select(np.setdiff1d(np.arange(len(rows)), held)), rows.select(held)


def distinct_documents(documents: Any, rows: Dataset) -> Any:
    """The document that each row is a part of, [rows], where equal ones (of the same tokens or
    texts, in the same rows) have the number of one of them."""
    column = next(name for name in ("input_ids", "text") if name in rows.column_names)
    digests = row_digests(rows, column)
    if len(seen := seen_hashes(rows)):
        digests = digests ^ seen.view(np.uint64)
    ordered = np.sort(digests)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(twice):
        return documents
    # A document with a row that stands nowhere else is equal to none.
    places = np.minimum(np.searchsorted(twice, digests), len(twice) - 1)
    suspects = np.flatnonzero(~np.isin(documents, documents[twice[places] != digests]))
    suspects = suspects[np.argsort(documents[suspects], kind="stable")]
    names = documents[suspects]
    starts = np.flatnonzero(np.append(True, names[1:] != names[:-1])[: len(names)])
    lengths = np.diff(np.append(starts, len(names)))
    within = np.arange(len(names)) - np.repeat(starts, lengths)
    factors = (2 * within + 1).astype(np.uint64)  # the order of a document's rows counts
    whole = np.add.reduceat(digests[suspects] * factors, starts) if len(starts) else starts
    _, firsts, same = np.unique(whole, return_index=True, return_inverse=True)
    united = documents.copy()
    united[suspects] = np.repeat(names[starts][firsts][same], lengths)
    return united


def held_out_rows(documents: Any, share: float | None, seed: int, count: int | None = None) -> Any:
    """The numbers of the rows that `hold_out` holds out, ascending, by each row's document."""
    ordered = np.sort(documents)  # np.unique would take 50 bytes for each
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])
    known, lengths = ordered[starts], np.diff(starts, append=len(ordered))
    most = known[lengths > len(ordered) // 2]  # more than all others together, in one document
    if len(known) == 1:
        known = documents = np.arange(len(documents))
        most = known[:0]
    if len(known) < 2:
        raise ValueError(
            "the corpus has a single row, so none can be held out: give more text or an "
            "eval_dataset"
        )
    if count is None:
        count = min(max(round((share or EVAL_SHARE) * len(known)), 1), len(known) - 1)
        count = count if share is not None else min(count, EVAL_ROWS)
    elif count >= len(known):
        raise ValueError(
            f"eval_rows {count} would hold out all {len(known)} documents, equal ones "
            "counted once: ask for fewer"
        )
    drawn = np.random.default_rng(seed).permutation(known)
    drawn = drawn[~np.isin(drawn, most)][:count]
    return np.flatnonzero(np.isin(documents, drawn))
