"""Rows of a corpus as they are being answered: what to ask next, and what was said so far."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from medusa_heads.config import IGNORED
from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.chat import ChatTemplate
from medusa_heads.data.encoding import to_continue
from medusa_heads.data.formats import QUESTIONS, is_plain, recognise
from medusa_heads.data.messages import SYSTEM_COLUMN, behind_system, messages_of, tools_of
from medusa_heads.data.prompts import lacks_template
from medusa_heads.errors import warn
from medusa_heads.inference.regeneration.answers import (
    NO_CONVERSATION,
    NO_QUESTION,
    SPECIAL_INSIDE,
    TEMPLATE,
)
from medusa_heads.inference.regeneration.prompts import Messages, Talk
from medusa_heads.inference.regeneration.replies import OwnWords

Turns = Literal["last", "all"]
Row = dict[str, "array[int]"]

_ROWS_AT_ONCE = 256
_TALKS = ("messages", "conversations")


class Unanswerable(ValueError):
    """A row cannot be asked, for one of the reasons of answers.py; the detail is for a reader."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Dialogue:
    """One row of a corpus: a prompt of tokens, which the target continues.

    Attributes:
        row: its place in the corpus.
        turns: how many answers it wants.
    """

    turns = 1

    def __init__(self, row: int, input_ids: Sequence[int]) -> None:
        self.row = row
        self._asked = array("q", input_ids)
        self._rows: list[Row] = []

    def ask(self, turn: int) -> tuple[Sequence[int], Talk | None]:
        """The question of a turn, as tokens and, in a conversation, as what they render. Raises
        Unanswerable: there is none."""
        if not self._asked:
            raise Unanswerable(NO_QUESTION, "the prompt has no tokens")
        return self._asked, None

    def take(self, tokens: Sequence[int]) -> None:
        """The target's answer to what was asked last."""
        words = array("q", tokens)
        unlearnt = array("q", [IGNORED]) * len(self._asked)
        row = {"input_ids": self._asked + words, "labels": unlearnt + words}
        before = self._rows[-1:]
        if before and row["input_ids"][: len(before[0]["input_ids"])] == before[0]["input_ids"]:
            # The template leaves earlier turns as they were: one row holds both answers.
            row["labels"][: len(before[0]["labels"])] = before[0]["labels"]
            self._rows.pop()
        self._rows.append(row)

    def rows(self) -> list[Row]:
        """`input_ids` and `labels` of what was answered so far: one row, or several where the
        template renders earlier turns in another way later on. What was then not the context of an
        answer is not claimed to be."""
        return self._rows


class ChatDialogue(Dialogue):
    """A conversation; the target answers in the place of its assistant, and is then held to its own
    words: later turns are asked with the target's earlier answers in them. What stands last from
    the assistant is replaced by an answer; a user's last message is answered. What is no
    conversation has a turn that cannot be asked.
    """

    def __init__(
        self,
        row: int,
        said: Any,
        turns: Turns,
        chat: ChatTemplate,
        own: OwnWords,
        tools: Any = None,
        system: Any = None,
    ) -> None:
        super().__init__(row, [])
        self._fault: Unanswerable | None = None
        messages: Messages = []
        try:
            if said:
                messages = behind_system(messages_of(said, "messages", ("user",)), system)
        except BadRow as error:
            self._fault = Unanswerable(NO_CONVERSATION, str(error))
        self._messages = list(messages)
        self._chat, self._own, self._tools = chat, own, tools
        places = [i for i, said in enumerate(messages) if said.get("role") == "assistant" and i]
        if messages and messages[-1].get("role") != "assistant":
            places.append(len(messages))
        self._places = places if turns == "all" else places[-1:]
        self.turns = max(len(self._places), 1)  # a row without a question is asked for in vain
        self._turn = 0

    def ask(self, turn: int) -> tuple[Sequence[int], Talk | None]:
        """The conversation up to that turn of the assistant."""
        if self._fault is not None:
            raise self._fault
        if not self._places:
            raise Unanswerable(NO_QUESTION, "no message comes before an assistant's turn")
        self._turn = turn
        before = self._messages[: self._places[turn]]
        try:
            tools = tools_of(self._tools)
            text = self._chat.render([dict(said) for said in before], tools, ask=True)
        except ValueError as error:
            raise Unanswerable(TEMPLATE, str(error.__cause__ or error)) from error
        self._asked = array("q", self._chat.encode([text])[0])
        return super().ask(turn)[0], Talk(before, tools, self._chat.arguments)

    def take(self, tokens: Sequence[int]) -> None:
        """The answer, which from now on is what was said; behind one that is no message, nothing
        can be asked."""
        super().take(tokens)
        place = self._places[self._turn]
        try:
            message = self._own.message(self._asked, tokens, tools_of(self._tools))
        except ValueError as error:
            self._fault = Unanswerable(SPECIAL_INSIDE, str(error))
        else:
            self._messages[place : place + 1] = [message]


@dataclass
class Dialogues:
    """The rows of a corpus that ask something, read and tokenised as they are come to: each time
    from the first row on. The other fields are as for `read_dialogues`."""

    corpus: Dataset
    column: str  # that says what is asked
    tokenizer: Any
    turns: Turns
    template_options: Mapping[str, Any]
    shard: tuple[int, int]

    def __post_init__(self) -> None:
        self._chat: Any = None
        self._own: Any = None
        if self.tokenizer is not None and self.tokenizer.chat_template:
            self._chat = ChatTemplate(self.tokenizer, arguments=self.template_options)
            self._own = OwnWords(self.tokenizer)

    @cached_property
    def talks(self) -> bool:
        """Whether it asks in conversations, which a chat template renders. What stands in `prompt`
        is all as the first one is."""
        if self.column != "prompt":
            return self.column in _TALKS
        asked = (row["prompt"] for row in self.corpus.select_columns("prompt"))
        return not is_plain(next((one for one in asked if one is not None), ""))

    def __len__(self) -> int:
        return len(range(self.shard[0], len(self.corpus), self.shard[1]))

    def __iter__(self) -> Iterator[Dialogue]:
        shard, shards = self.shard
        for start in range(0, len(self.corpus), _ROWS_AT_ONCE):
            rows = range(start, min(start + _ROWS_AT_ONCE, len(self.corpus)))
            mine = [row for row in rows if row % shards == shard]
            table = self.corpus[rows.start : rows.stop]
            asked = [table[self.column][row - start] for row in mine]
            if self.column == "input_ids":
                yield from (Dialogue(row, ids or []) for row, ids in zip(mine, asked, strict=True))
            elif not self.talks:
                texts = [text or "" for text in asked]
                encoded = self.tokenizer(texts, verbose=False)["input_ids"] if texts else []
                for row, text, ids in zip(mine, texts, encoded, strict=True):
                    yield Dialogue(row, to_continue(self.tokenizer, text, ids) if text else [])
            else:
                for row, said in zip(mine, asked, strict=True):
                    beside = [
                        table[name][row - start] if name in table else None
                        for name in ("tools", SYSTEM_COLUMN)
                    ]
                    if self.column != "conversations":
                        beside.pop()
                    yield ChatDialogue(row, said, self.turns, self._chat, self._own, *beside)


def read_dialogues(
    corpus: Dataset,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    turns: Turns = "all",
    num_prompts: int | None = None,
    prompt_length: int = 64,
    seed: int = 0,
    template_options: Mapping[str, Any] | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Dialogues:
    """What a corpus asks, by its columns: conversations in `messages` or `conversations` (and
    `tools`, where they have any); prompts in `prompt`, each a text or a conversation; prompts in
    `input_ids`; or documents in `text`, from which windows of `prompt_length` tokens are drawn by
    the seed. Raises ValueError: no such column, no rows, or no tokenizer or chat template where one
    is needed.

    Args:
        tokenizer: the target's; not needed for `input_ids`.
        turns: of conversations, which turns of the assistant are answered.
        num_prompts: the first so many rows; of documents, so many windows. Default: all, or 2048.
        template_options: further variables of the chat template.
        shard: (i, n) are rows i, i + n, i + 2n and so on: what one of n processes is to ask.
    """
    if not len(corpus):
        raise ValueError("the corpus is empty: give one with prompts in it")
    (column,) = recognise(corpus.column_names, known=QUESTIONS).columns
    if column != "text" and num_prompts is not None:
        corpus = corpus.select(range(min(num_prompts, len(corpus))))
    _check_column(corpus, column)
    if column != "input_ids" and tokenizer is None:
        raise ValueError(
            f"a corpus with a column {column!r} needs the target's tokenizer, and none lies beside "
            "the target"
        )
    dialogues = Dialogues(corpus, column, tokenizer, turns, template_options or {}, shard)
    if dialogues.talks and tokenizer is not None and not tokenizer.chat_template:
        raise ValueError(
            f"the corpus holds conversations in {column!r}, and the target's tokenizer has no chat "
            "template: put it into the target's folder as chat_template.jinja, or give plain "
            "prompts"
        )
    if column == "text":
        assert tokenizer is not None
        from medusa_heads.data.corpus import draw_windows

        windows = draw_windows(
            [text or "" for text in corpus["text"]],
            tokenizer,
            num_prompts=2048 if num_prompts is None else num_prompts,
            prompt_length=prompt_length,
            seed=seed,
        )
        ids = [np.asarray(ids, np.int32) for _, ids in windows]
        dialogues.corpus, dialogues.column = Dataset.from_dict({"input_ids": ids}), "input_ids"
    if not len(dialogues):
        raise ValueError(
            f"expected rows in shard {shard[0]} of {shard[1]}, got {len(dialogues.corpus)} in all"
        )
    if column == "prompt" and not dialogues.talks and lacks_template(corpus[0][column], tokenizer):
        warn(
            "the corpus holds texts in 'prompt', which the target continues as they are, without "
            "its chat template: for answers of a chat model, give conversations in 'messages'"
        )
    return dialogues


def _check_column(corpus: Dataset, column: str) -> None:
    """Raises ValueError where token ids or texts are something else; conversations are looked at
    one by one."""
    expected = {"input_ids": ("lists of integers", "int"), "text": ("texts", "string")}
    if column in expected:
        words, kind = expected[column]
        found = corpus.features[column]
        inner = getattr(found, "feature", None) if column == "input_ids" else found
        if kind not in str(getattr(inner, "dtype", None)):
            raise ValueError(f"expected {words} in the column {column!r}, got {found}")
