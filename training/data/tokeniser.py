"""From a row of a corpus to rows of tokens: masks, end tokens, and the cut at the longest row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.chat import ChatTemplate, Rendered, continuation
from medusa_heads.data.encoding import (
    Chosen,
    Encoder,
    Ragged,
    appends_end,
    begins,
    ends_of,
    is_blank,
)
from medusa_heads.data.formats import (
    Completion,
    Conversation,
    Document,
    Format,
    Tokens,
)
from medusa_heads.data.plain_rows import PLACE_COLUMN
from medusa_heads.data.turns import LearntRows, end_of_turns, labelled, replaced
from medusa_heads.training.data.columns import token_features
from medusa_heads.training.data.cut import blocks, cut
from medusa_heads.training.data.row_facts import RowLimits, whole_rows
from medusa_heads.training.data.seen import UNFIT, Seen, Sight

_Made = tuple[LearntRows, Any, dict[int, str]]
"""Rows of tokens, how many labels each source lost, and why some sources have no row."""


@dataclass
class Tokeniser:
    """What `datasets.map` calls, in batches; it keeps nothing, so processes can share the work."""

    format: Format  # how a row is read
    tokenizer: PreTrainedTokenizerBase | None  # None only for rows that are tokens already
    max_length: int  # longer documents become several rows, longer answers are cut on the right
    chat: ChatTemplate | None = None  # for conversations
    limits: RowLimits | None = None  # None where `check_rows` refuses rows that do not fit
    stop_ids: Collection[int] = ()  # tokens that end the target's generation
    sight: Sight = field(default_factory=Sight)  # how the target is shown images

    def __post_init__(self) -> None:
        self._encoder = None if self.tokenizer is None else Encoder(self.tokenizer)

    @property
    def shown(self) -> bool:
        """Whether rows may have images."""
        return self.sight.processor is not None

    def settle(self, batch: Mapping[str, Sequence[Any]]) -> None:
        """Choose the library that encodes, by rows from all over a corpus: the choice goes along to
        other processes."""
        if self._encoder is not None and self._encoder.is_fast is None:
            self._encoder.only_chooses = True  # the rows are made later, with all others
            with suppress(Chosen):
                self._made(batch, {})
            self._encoder.only_chooses = False

    def __call__(
        self, batch: pa.Table | Mapping[str, Sequence[Any]], documents: Sequence[int]
    ) -> pa.Table:
        """Rows in the columns of `token_features`: the tokens, which row of the corpus each is a
        part of, why that one cannot be used (then without tokens) and its place, and how many
        labels were cut off. A batch that is a table is of whole numbers; only rows of it that
        cannot be taken as they are are looked at one by one."""
        schema, numbers = token_features(shown=self.shown).arrow_schema, np.asarray(documents)
        tables = []
        if isinstance(batch, pa.Table):
            whole = whole_rows(batch, self.max_length, self.limits)
            taken = batch.select(["input_ids", "labels"]).filter(pa.array(whole))
            columns = [*taken.columns, numbers[whole]]
            columns += [pa.nulls(len(taken), kind) for kind in schema.types[3:5]]
            columns.append(np.zeros(len(taken), np.int64))
            tables.append(pa.table(columns, schema.names).cast(schema))
            batch, numbers = batch.filter(pa.array(~whole)).to_pydict(), numbers[~whole]
        if len(numbers) or not tables:
            tables.append(self._table(batch, numbers, schema))
        made = pa.concat_tables(tables)
        return made.take(np.argsort(made["document"], kind="stable")) if len(tables) > 1 else made

    def _table(
        self, batch: Mapping[str, Sequence[Any]], documents: Any, schema: pa.Schema
    ) -> pa.Table:
        talks: dict[int, Seen] = {}
        rows, lost, problems = self._made(batch, talks)
        ids, labels, sources = rows
        reasons = [problems.get(source) for source in sources.tolist()]
        if self.shown:  # else no row is looked at by itself
            images, seen, cut_short = self.sight.columns(talks, ids, sources.tolist())
            reasons = [a or b for a, b in zip(reasons, cut_short, strict=True)]
        columns = [(each.values, each.lengths) for each in (ids, labels)]
        if self.limits is not None and len(sources) and not self.limits.fit(*columns):
            for row in range(len(sources)):
                parts = (each.values[slice(*each.offsets[row : row + 2])] for each in (ids, labels))
                reasons[row] = reasons[row] or self.limits.problem(*parts)
            fits = np.array([reason is None for reason in reasons])
            ids, labels = (each.part(each.starts, each.lengths * fits) for each in (ids, labels))
        where = batch.get(PLACE_COLUMN)
        at = [
            None if where is None or reason is None else where[source]
            for reason, source in zip(reasons, sources.tolist(), strict=True)
        ]
        is_first = np.diff(sources, prepend=-1) != 0  # what was cut off is told once
        lists = [
            pa.ListArray.from_arrays(pa.array(each.offsets, pa.int32()), pa.array(each.values))
            for each in (ids, labels)
        ]
        told = np.where(is_first, lost[sources], 0)
        made = [*lists, documents[sources], reasons, at, told]
        if self.shown:
            made += [pa.array(images, schema.types[-2]), seen]
        return pa.table(made, schema.names).cast(schema)

    def _made(self, batch: Mapping[str, Sequence[Any]], talks: dict[int, Seen]) -> _Made:
        """Rows of tokens, how many labels of each row of the batch were cut off, and why some
        cannot be used: these have one row without tokens. Those with images go to `talks`."""
        found: dict[Any, list[tuple[int, Any]]] = {}  # by the method that reads the contents
        problems: dict[int, str] = {}
        count = len(next(iter(batch.values())))
        for number, values in enumerate(zip(*batch.values(), strict=True)):
            try:
                content = self.format.read(dict(zip(batch, values, strict=True)))
                if isinstance(content, Conversation):
                    if self.chat is None or self._encoder is None:
                        raise BadRow("messages need a chat template, and the tokenizer has none")
                    if not self._encoder.only_chooses:
                        content = self.sight.of(content)
                    if isinstance(content, Seen):
                        talks[number] = content
            except BadRow as problem:
                problems[number] = str(problem)
            else:
                found.setdefault(type(content), []).append((number, content))
        makers: dict[Any, Callable[[Any], _Made]] = {
            Document: self._documents,
            Completion: self._completions,
            Conversation: self._conversations,
            Seen: self._seen,
            Tokens: self._tokens,
        }
        lost, parts = np.zeros(count, np.int64), []
        for kind, numbered in found.items():
            numbers, contents = zip(*numbered, strict=True)
            rows, lost_here, refused = makers[kind](contents)
            of = np.array(numbers)
            lost[of] = lost_here
            problems |= {int(of[place]): problem for place, problem in refused.items()}
            parts.append(rows.of(of))
        if problems:
            empty = Ragged.of([[]] * len(problems))
            parts.append(LearntRows(empty, empty, np.array(list(problems))))
        return LearntRows.joined(parts), lost, problems

    def _documents(self, contents: Sequence[Document]) -> _Made:
        ids = self._ended(self._encoded([content.text for content in contents]))
        return blocks(ids, self.max_length), 0, {}

    def _completions(self, contents: Sequence[Completion]) -> _Made:
        asked = [content.prompt for content in contents]
        encoded = self._encoded(
            [*asked, *(content.prompt + content.completion for content in contents)]
        )
        problems, merged, sources = {}, [], np.arange(len(contents))
        prompts, ids = encoded.take(sources), encoded.take(sources + len(contents))
        for number in np.flatnonzero(~begins(prompts.stretches, ids.stretches)).tolist():
            assert self.tokenizer is not None
            joined = continuation(
                self.tokenizer, prompts.row(number), contents[number].completion, ids.row(number)
            )
            if joined is None:
                problems[number] = (
                    "the tokenizer merges the prompt with the completion, and the two cannot be "
                    "taken apart: begin the completion with the space or line break between them"
                )
            else:
                merged.append((number, joined))
        kept = np.setdiff1d(sources, list(problems))
        ids = self._until_stop(replaced(ids, merged), prompts.lengths)
        ids = self._ended(ids).take(kept)
        inside = np.arange(len(ids.values)) - np.repeat(ids.starts, ids.lengths)
        labels = labelled(ids, inside >= np.repeat(prompts.lengths[kept], ids.lengths))
        return self._cut(LearntRows(ids, labels, kept), len(contents), problems)

    def _conversations(self, contents: Sequence[Conversation]) -> _Made:
        assert self.chat is not None and self._encoder is not None
        as_rendered = partial(self._encoder, special_tokens=False)
        encode = self._encoded if self.shown else as_rendered  # as a processor does, or a tokenizer
        rows, problems = self._answers(self.chat.rendered(contents), encode)
        return self._cut(rows, len(contents), problems)

    def _seen(self, contents: Sequence[Seen]) -> _Made:
        """Where no answer is left, an image may be too large, which is no fault of the row."""
        assert self.chat is not None
        pairs = zip(contents, self.chat.rendered(contents), strict=True)
        filled = [self.sight.filled(talk, found) for talk, found in pairs]
        rows, problems = self._answers(filled, self._encoded)
        rows, lost, refused = cut(rows, self.max_length, len(contents))
        return rows, lost, problems | dict.fromkeys(refused, UNFIT)

    def _answers(
        self, talks: Sequence[Rendered | BadRow], encode: Callable[[list[str]], Ragged]
    ) -> tuple[LearntRows, dict[int, str]]:
        assert self.chat is not None
        problems, rendered, sources = {}, [], []
        for source, found in enumerate(talks):
            if isinstance(found, BadRow):
                problems[source] = str(found)
            else:
                rendered.append(found)
                sources.append(source)
        texts = [text for each in rendered for text in (*each.asked, *each.answered)]
        rows, refused = self.chat.rows_of(rendered, encode(texts))
        problems |= {sources[number]: problem for number, problem in refused.items()}
        return rows.of(np.array(sources, np.int64)), problems

    def _tokens(self, contents: Sequence[Tokens]) -> _Made:
        """One that is learnt whole is a document, any other has an answer."""
        ids = Ragged.of([content.input_ids for content in contents])
        labels = Ragged.of([content.labels for content in contents])
        # Unequal lengths are refused where rows are checked.
        long = (ids.lengths > self.max_length) & (ids.lengths == labels.lengths)
        whole = long & begins(ids.stretches, labels.stretches)
        ready, documents, answered = map(np.flatnonzero, (~long, whole, long & ~whole))
        shortened, lost, problems = self._cut(
            LearntRows(ids.take(answered), labels.take(answered), answered), len(contents), {}
        )
        parts = [
            LearntRows(ids.take(ready), labels.take(ready), ready),
            blocks(ids.take(documents), self.max_length).of(documents),
            shortened,
        ]
        return LearntRows.joined(parts), lost, problems

    def _cut(self, rows: LearntRows, count: int, problems: dict[int, str]) -> _Made:
        rows, lost, refused = cut(rows, self.max_length, count)
        return rows, lost, problems | refused

    def _encoded(self, texts: list[str]) -> Ragged:
        """Token ids with what the tokenizer puts before a text that has it not, and nothing behind
        it."""
        assert self.tokenizer is not None and self._encoder is not None
        ids = self._encoder(texts, special_tokens=True)
        doubled = np.zeros(len(texts), bool)
        for number in self._twice(self.tokenizer.bos_token_id, ids).tolist():
            doubled[number] = texts[number].startswith(self.tokenizer.bos_token)
        ids = ids.part(ids.starts + doubled, ids.lengths - doubled)
        end, token = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        at_end = [] if token is None else _at_end(ids, token).tolist()
        ended = {number for number in at_end if not texts[number].endswith(end)}
        if len(ended) < len(at_end) and appends_end(self.tokenizer):
            before = ids.offsets[1:] - 2  # where the last token but one stands, if there is one
            twice = (n for n in at_end if before[n] >= ids.offsets[n])
            ended.update(n for n in twice if ids.values[before[n]] == token)
        return ids.part(ids.starts, ids.lengths - np.isin(np.arange(len(texts)), [*ended]))

    def _twice(self, start: int | None, ids: Ragged) -> Any:
        """The numbers of the rows that begin with the same token twice."""
        long = np.flatnonzero(ids.lengths > 1)
        first, second = (ids.values[ids.starts[long] + place] for place in (0, 1))
        return long[(first == start) & (second == start)]

    def _until_stop(self, ids: Ragged, starts: Any) -> Ragged:
        """Without what stands behind the first token at the end that ends the target's text, as a
        chat template may have written both into a completion: the target writes no more."""
        assert self.tokenizer is not None
        blank = partial(is_blank, self.tokenizer)
        ends = end_of_turns(ids, starts, self.stop_ids, self.stop_ids, blank)
        return ids.part(ids.starts, ends)

    def _ended(self, ids: Ragged) -> Ragged:
        """With the tokenizer's end token, if it has one, but where the row ends already as the
        target's text does."""
        assert self.tokenizer is not None
        end = self.tokenizer.eos_token_id
        if end is None:
            return ids
        open_ = np.ones(len(ids.lengths), bool)
        open_[_at_end(ids, end, *self.stop_ids)] = False
        values = np.insert(ids.values, ids.offsets[1:][open_], end)
        return Ragged(values, ends_of(ids.lengths + open_))


def _at_end(ids: Ragged, *ends: int) -> Any:
    """The numbers of the rows that end with one of these tokens."""
    filled = np.flatnonzero(ids.lengths)
    return filled[np.isin(ids.values[ids.offsets[filled + 1] - 1], ends)]
