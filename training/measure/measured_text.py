"""A part of a corpus, drawn from all of it, just large enough to measure heads on."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from medusa_heads.config import IGNORED
from medusa_heads.data.plain_rows import PLACE_COLUMN
from medusa_heads.data.sources import Corpus
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.data.prepare import make_tokeniser
from medusa_heads.training.data.row_facts import check_rows
from medusa_heads.training.data.tokenise import tokenise
from medusa_heads.training.loss.rows import head_labels

logger = logging.getLogger(__name__)

_DOCUMENTS = 64  # read at a time: whole ones, of which the first may be long and alike throughout


def draw_rows(
    target: TargetModel,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase | None,
    settings: DataArguments,
    *,
    num_heads: int,
    tokens: int,
    seed: int = 0,
) -> Dataset:
    """Rows with about so many supervised tokens, or all rows of a smaller corpus (a table).
    Documents are drawn until they have enough, then rows from them: no others are tokenised. Raises
    ValueError: text that cannot be used, or too little: somewhere `num_heads` tokens ahead must be
    known."""
    if corpus.format.name != "tokens":
        target.check_length(settings.max_length, "max_length", "lower max_length")
    tokeniser = make_tokeniser(corpus, tokenizer, settings, target)
    generator = np.random.default_rng(seed)
    documents = generator.permutation(len(corpus.rows)).tolist()
    tables, found = [], 0
    for start in range(0, len(documents), _DOCUMENTS):
        if found >= tokens:
            break
        part = _part(corpus, documents[start : start + _DOCUMENTS])
        tables.append(tokenise(part, tokeniser).rows)
        found += sum(map(_supervised, tables[-1]["labels"]))
    rows = concatenate_datasets(tables)
    drawn = generator.permutation(len(rows))
    reached = np.cumsum([_supervised(rows[int(i)]["labels"]) for i in drawn])
    rows = rows.select(drawn[: np.searchsorted(reached, tokens) + 1])
    facts = check_rows(rows, target, name="corpus", heads_reached=num_heads)
    if (doubt := facts.doubt("corpus")) is not None:
        logger.warning(doubt)
    return rows


def measurable(rows: Dataset, num_heads: int) -> list[int]:
    """At how many positions of each row every head has a true token."""
    labels = (torch.as_tensor(row["labels"])[None] for row in rows.select_columns(["labels"]))
    known = (head_labels(labels_1T, num_heads) != IGNORED for labels_1T in labels)
    return [int(known_1TK.all(dim=2).sum()) for known_1TK in known]


def _part(corpus: Corpus, documents: list[int]) -> Corpus:
    """Some rows of a corpus, which know where they stand in it."""
    rows = corpus.rows.select(documents)
    if PLACE_COLUMN not in rows.column_names:
        rows = rows.add_column(PLACE_COLUMN, [corpus.place(document) for document in documents])
    return replace(corpus, rows=rows)


def _supervised(labels: list[int]) -> int:
    return sum(label != IGNORED for label in labels)
