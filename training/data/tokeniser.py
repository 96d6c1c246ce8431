"""From a row of a corpus to rows of tokens: masks, end tokens, and the cut at the longest row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from medusa_heads.config import IGNORED
from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.chat import ChatTemplate, Rendered, continuation
from medusa_heads.data.formats import (
    LARGEST_TOKEN,
    Completion,
    Content,
    Conversation,
    Document,
    Format,
    Tokens,
)
from medusa_heads.data.sources import PLACE_COLUMN
from medusa_heads.training.data.columns import flat
from medusa_heads.training.data.row_facts import RowLimits

_CHARACTERS_AT_ONCE = 1 << 20

Row = tuple[list[int], list[int]]
"""input_ids, and labels of the same length, unshifted, -100 where the text was not generated."""
Outcome = tuple[list[Row], int, str | None]


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
        made: list[tuple[Any, ...]] = []
        table = [
            dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)
        ]
        outcomes = self._outcomes(table)
        for document, row, (rows, lost, refusal) in zip(documents, table, outcomes, strict=True):
            for part in rows:
                problem = refusal or self._problem(part)
                tokens, place = (([], []), row.get(PLACE_COLUMN)) if problem else (part, None)
                made.append((*tokens, document, problem, place, lost))
                lost = 0  # told once
        return {name: [each[i] for each in made] for i, name in enumerate(token_features())}

    def arrow(self, table: pa.Table, documents: Sequence[int]) -> pa.Table:
        """The same of a table of whole numbers, in which only rows that cannot be taken as they are
        are looked at one by one."""
        whole, schema = self._whole(table), token_features().arrow_schema
        numbers = np.asarray(documents)
        taken = table.select(["input_ids", "labels"]).filter(pa.array(whole))
        columns = [*taken.columns, numbers[whole]]
        columns += [pa.nulls(len(taken), kind) for kind in schema.types[3:5]]
        tables = [pa.table([*columns, np.zeros(len(taken), np.int64)], schema.names).cast(schema)]
        if len(taken) < len(table):
            rows = table.filter(pa.array(~whole)).to_pydict()
            tables.append(pa.table(self(rows, numbers[~whole].tolist()), schema))
        made = pa.concat_tables(tables)
        return made.take(np.argsort(made["document"], kind="stable")) if len(tables) > 1 else made

    def _whole(self, table: pa.Table) -> Any:
        """Which rows can be taken as they are, [rows] bool."""
        ids, labels = (table[name] for name in ("input_ids", "labels"))
        lengths, label_lengths = map(pc.list_value_length, (ids, labels))
        right = pc.and_(pc.greater(lengths, 0), pc.less_equal(lengths, self.max_length))
        right = pc.and_(right, pc.equal(lengths, label_lengths)).fill_null(False).combine_chunks()
        whole = right.to_numpy(zero_copy_only=False)
        places = np.flatnonzero(whole)
        (ids_T, lengths), (labels_T, _) = (flat(column.filter(right)) for column in (ids, labels))
        # Nulls have become NaN, which no comparison holds for.
        fine_T = (abs(ids_T) <= LARGEST_TOKEN) & (abs(labels_T) <= LARGEST_TOKEN)
        if self.limits is not None:
            fine_T &= (ids_T >= 0) & (ids_T < self.limits.vocab_size)
            fine_T &= (labels_T == ids_T) | (labels_T == IGNORED)
            if self.limits.context is not None:
                whole[places[lengths > self.limits.context]] = False
        rows = np.searchsorted(np.cumsum(lengths), np.flatnonzero(~fine_T), side="right")
        whole[places[rows]] = False
        return whole

    def _outcomes(self, table: Sequence[Mapping[str, Any]]) -> Iterator[Outcome]:
        """Of each row its rows of tokens, how many labels were cut off, and why it cannot be used;
        all texts are encoded together, by all threads that the tokenizer has."""
        found: list[Content | Rendered | BadRow] = []
        plain: list[str] = []
        rendered: list[str] = []
        for row in table:
            try:
                content = self._content(row)
            except BadRow as problem:
                found.append(problem)
                continue
            found.append(content)
            if isinstance(content, Document):
                plain.append(content.text)
            elif isinstance(content, Completion):
                plain += [content.prompt, content.prompt + content.completion]
            elif isinstance(content, Rendered):
                rendered += [*content.asked, *content.answered]
        encoded = self._encode(plain)
        chats = iter(()) if self.chat is None else _in_parts(self.chat.encode, rendered)
        for entry in found:
            try:
                if isinstance(entry, BadRow):
                    raise entry
                rows, lost = self._rows(entry, encoded, chats)
            except BadRow as problem:
                yield [([], [])], 0, str(problem)
            else:
                yield rows, lost, None

    def _problem(self, row: Row) -> str | None:
        return None if self.limits is None else self.limits.problem(*map(np.asarray, row))

    def _content(self, row: Mapping[str, Any]) -> Content | Rendered:
        content = self.format.read(row)
        if not isinstance(content, Conversation):
            return content
        if self.chat is None:
            raise BadRow("messages need a chat template, and the tokenizer has none")
        return self.chat.rendered(content)

    def _rows(
        self, content: Content | Rendered, encoded: Iterator[list[int]], chats: Iterator[list[int]]
    ) -> tuple[list[Row], int]:
        if isinstance(content, Tokens):
            return self._ready(content.input_ids, content.labels)
        if isinstance(content, Document):
            return self._blocks(self._ended(next(encoded))), 0
        if isinstance(content, Completion):
            return self._cut([self._completion(content, next(encoded), next(encoded))])
        assert isinstance(content, Rendered) and self.chat is not None
        turns = 2 * len(content.spoken)
        return self._cut(self.chat.rows_of(content, list(islice(chats, turns))))

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

    def _completion(self, content: Completion, prompt_ids: list[int], ids: list[int]) -> Row:
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

    def _encode(self, texts: list[str]) -> Iterator[list[int]]:
        """Token ids with what the tokenizer puts before a text, and nothing behind it."""

        def encode(part: list[str]) -> list[list[int]]:
            assert self.tokenizer is not None
            # verbose=False: documents may be longer than the model's maximum, rows are not
            found = self.tokenizer(part, verbose=False, return_attention_mask=False)["input_ids"]
            return list(found)

        for text, ids in zip(texts, _in_parts(encode, texts), strict=True):
            assert self.tokenizer is not None
            end = self.tokenizer.eos_token_id
            added = end is not None and ids[-1:] == [end]
            yield ids[:-1] if added and not text.endswith(self.tokenizer.eos_token) else ids

    def _ended(self, ids: list[int]) -> list[int]:
        """With the token by which the target ends a text, if it has one."""
        assert self.tokenizer is not None
        end = self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]


def token_features() -> Features:
    """Types of the columns that a Tokeniser makes."""
    kinds = {"document": "int64", "problem": "string", "place": "string", "lost": "int64"}
    return Features({**row_features(), **{name: Value(kind) for name, kind in kinds.items()}})


def row_features(*more: str) -> Features:
    """Types of the columns of rows of tokens."""
    return Features({name: List(Value("int32")) for name in ("input_ids", "labels", *more)})


def _in_parts(
    encode: Callable[[list[str]], list[list[int]]], texts: list[str]
) -> Iterator[list[int]]:
    """Texts encoded together, but not so many that their encodings would fill the memory."""
    part: list[str] = []
    size = 0
    for text in texts:
        part.append(text)
        size += len(text)
        if size >= _CHARACTERS_AT_ONCE:
            yield from encode(part)
            part, size = [], 0
    if part:
        yield from encode(part)
