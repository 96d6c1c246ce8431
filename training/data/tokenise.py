"""From a corpus's rows to rows of tokens: masks, end tokens, and the cut at the longest row."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from medusa_heads.config import IGNORED
from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.chat import ChatTemplate, continuation
from medusa_heads.data.formats import (
    DOCUMENT_COLUMN,
    Completion,
    Conversation,
    Document,
    Format,
    Tokens,
)
from medusa_heads.data.sources import PLACE_COLUMN, Corpus
from medusa_heads.training.data.row_facts import RowLimits

logger = logging.getLogger(__name__)

Row = tuple[list[int], list[int]]
"""input_ids, and labels of the same length, unshifted, -100 where the text was not generated."""


@dataclass
class Tokeniser:
    """What `datasets.map` calls, in batches; it keeps nothing, so processes can share the work."""

    format: Format  # how a row is read
    tokenizer: PreTrainedTokenizerBase | None  # None only for rows that are tokens already
    max_length: int  # longer documents become several rows, longer answers are cut on the right
    chat: ChatTemplate | None = None  # for conversations
    limits: RowLimits | None = None  # None where `check_rows` refuses rows that do not fit

    def __call__(
        self, batch: Mapping[str, Sequence[Any]], documents: Sequence[int]
    ) -> dict[str, list[Any]]:
        """Columns of rows: the tokens, which row of the corpus each is a part of, why that one
        cannot be used (then without tokens) and its place, and how many labels were cut off."""
        made: dict[str, list[Any]] = {name: [] for name in token_features()}
        names = list(batch)
        for document, *values in zip(documents, *batch.values(), strict=True):
            row, lost = dict(zip(names, values, strict=True)), 0
            try:
                rows, lost = self._rows(row)
                problems = [self._problem(part) for part in rows]
            except BadRow as found:
                rows, problems = [([], [])], [str(found)]
            for (input_ids, labels), problem in zip(rows, problems, strict=True):
                made["input_ids"].append([] if problem else input_ids)
                made["labels"].append([] if problem else labels)
                made["document"].append(document)
                made["problem"].append(problem)
                made["place"].append(row.get(PLACE_COLUMN) if problem else None)
                made["lost"].append(lost)
                lost = 0  # told once
        return made

    def _problem(self, row: Row) -> str | None:
        return None if self.limits is None else self.limits.problem(*map(np.asarray, row))

    def _rows(self, row: Mapping[str, Any]) -> tuple[list[Row], int]:
        content = self.format.read(row)
        if isinstance(content, Tokens):
            return self._ready(content.input_ids, content.labels)
        if isinstance(content, Document):
            return self._blocks(self._ended(self._encode(content.text))), 0
        if isinstance(content, Completion):
            return self._cut([self._completion(content)])
        assert isinstance(content, Conversation)
        if self.chat is None:
            raise BadRow("messages need a chat template, and the tokenizer has none")
        return self._cut(self.chat.rows(content))

    def _ready(self, ids: list[int], labels: list[int]) -> tuple[list[Row], int]:
        """Rows of tokens: one that is learnt whole is a document, any other has an answer."""
        if len(ids) <= self.max_length or len(ids) != len(labels):
            return [(ids, labels)], 0  # unequal lengths are refused where rows are checked
        return (self._blocks(ids), 0) if ids == labels else self._cut([(ids, labels)])

    def _blocks(self, ids: list[int]) -> list[Row]:
        """A document as rows of at most `max_length`, learnt whole."""
        starts = range(0, len(ids), self.max_length)
        blocks = [ids[start : start + self.max_length] for start in starts]
        return [(block, block) for block in blocks]

    def _completion(self, content: Completion) -> Row:
        prompt_ids = self._encode(content.prompt)
        ids = self._encode(content.prompt + content.completion)
        if ids[: len(prompt_ids)] != prompt_ids:
            assert self.tokenizer is not None
            joined = continuation(self.tokenizer, prompt_ids, content.completion, ids)
            if joined is None:
                raise BadRow(
                    "the tokenizer merges the prompt with the completion, and the two cannot be "
                    "taken apart: begin the completion with the space or line break between them"
                )
            ids = joined
        ids = self._ended(ids)
        return ids, [IGNORED] * len(prompt_ids) + ids[len(prompt_ids) :]

    def _cut(self, rows: list[Row]) -> tuple[list[Row], int]:
        """Rows of at most `max_length`, and how many labels that cost."""
        kept, lost = [], 0
        for ids, labels in rows:
            lost += sum(label != IGNORED for label in labels[self.max_length :])
            if any(label != IGNORED for label in labels[: self.max_length]):
                kept.append((ids[: self.max_length], labels[: self.max_length]))
        if not kept:
            length = min(len(ids) for ids, _ in rows)
            raise BadRow(
                f"of its {length} tokens no answer is left within max_length {self.max_length}"
            )
        return kept, lost

    def _encode(self, text: str) -> list[int]:
        """Token ids with what the tokenizer puts before a text, and nothing behind it."""
        assert self.tokenizer is not None
        # verbose=False: a whole document may be longer than the model's maximum, its rows are not
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1:] == [end] and not text.endswith(self.tokenizer.eos_token):
            return ids[:-1]
        return ids

    def _ended(self, ids: list[int]) -> list[int]:
        """With the token by which the target ends a text, if it has one."""
        assert self.tokenizer is not None
        end = self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]


def tokenise(corpus: Corpus, tokeniser: Tokeniser, num_proc: int | None = None) -> Corpus:
    """A table as rows of tokens, none longer than `max_length`, in the columns `input_ids`,
    `labels` and `document` (which one the row is a part of). Raises ValueError at broken rows,
    unless they may be left out, or where no row is left."""
    ready = corpus.format.name == "tokens"
    if ready and tokeniser.limits is None and _are_rows(corpus.rows, tokeniser.max_length):
        rows = corpus.rows.select_columns(["input_ids", "labels"])
        rows, lost = rows.add_column(DOCUMENT_COLUMN, np.arange(len(rows))), np.zeros(1)
    else:
        rows, lost = _made(corpus, tokeniser, num_proc)
    if not len(rows):
        raise ValueError(f"the corpus is empty: give one with text in it ({corpus.name})")
    if ready and DOCUMENT_COLUMN in corpus.rows.column_names:
        named = _documents(corpus)[rows.with_format("numpy")[DOCUMENT_COLUMN][:]]
        rows = rows.remove_columns(DOCUMENT_COLUMN).add_column(DOCUMENT_COLUMN, named)
    cut_documents, cut_tokens = int((lost > 0).sum()), int(lost.sum())
    return replace(corpus, rows=rows, cut_documents=cut_documents, cut_tokens=cut_tokens)


def _made(corpus: Corpus, tokeniser: Tokeniser, num_proc: int | None) -> tuple[Dataset, Any]:
    """The rows, each with the number of the row of the corpus it is a part of; and an array of how
    many labels those lost."""
    made = corpus.rows.map(
        tokeniser,
        batched=True,
        with_indices=True,
        remove_columns=corpus.rows.column_names,
        features=token_features(),
        load_from_cache_file=False,
        num_proc=num_proc,
        desc="Tokenising",
    )
    fine = made.data.column("problem").combine_chunks().is_null().to_numpy(zero_copy_only=False)
    for row in made.select(np.flatnonzero(~fine)):
        place = row["place"] or corpus.place(row["document"])
        corpus.bad_rows.add(place, row["problem"])
    corpus.bad_rows.settle()
    lost = np.asarray(made.data.column("lost"))
    if lost.any():
        logger.warning(
            "%d documents of %s were longer than max_length %d: %d supervised tokens were cut off",
            (lost > 0).sum(),
            corpus.name,
            tokeniser.max_length,
            lost.sum(),
        )
    rows = made.select_columns(["input_ids", "labels", DOCUMENT_COLUMN])
    rows = rows if fine.all() else rows.select(np.flatnonzero(fine))
    return rows, lost


def _documents(corpus: Corpus) -> Any:
    """The number of the document that each row of tokens is a part of, [rows]: by the column of
    that name, if it holds numbers or names, and a row that names none is a document of its own."""
    rows = corpus.rows
    numbers = np.arange(len(rows))
    kind = str(getattr(rows.features.get(DOCUMENT_COLUMN), "dtype", ""))
    if kind != "string" and "int" not in kind:
        return numbers
    firsts: dict[Any, int] = {}
    for number, name in enumerate(rows[DOCUMENT_COLUMN]):
        if name is not None:
            numbers[number] = firsts.setdefault(name, number)
    return numbers


def token_features() -> Features:
    """Types of the columns that a Tokeniser makes."""
    kinds = {"document": "int64", "problem": "string", "place": "string", "lost": "int64"}
    return Features({**row_features(), **{name: Value(kind) for name, kind in kinds.items()}})


def row_features(*more: str) -> Features:
    """Types of the columns of rows of tokens."""
    return Features({name: List(Value("int32")) for name in ("input_ids", "labels", *more)})


def _are_rows(rows: Dataset, max_length: int) -> bool:
    """Whether a table of tokens can be taken as it is, without a look at each of them."""
    from pyarrow import compute

    kinds = [getattr(rows.features[name], "feature", None) for name in ("input_ids", "labels")]
    if not all("int" in str(getattr(kind, "dtype", "")) for kind in kinds):
        return False
    if any(rows.data.column(name).null_count for name in ("input_ids", "labels")):
        return False
    longest = compute.max(compute.list_value_length(rows.with_format("arrow")["input_ids"][:]))
    return bool(longest.as_py() <= max_length)
