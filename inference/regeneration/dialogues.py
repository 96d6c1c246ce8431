"""Rows of a corpus as they are being answered: what to ask next, and what was said so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol

from medusa_heads.config import IGNORED
from medusa_heads.files import parse_json
from medusa_heads.inference.regeneration.answers import NO_QUESTION, TEMPLATE
from medusa_heads.inference.regeneration.prompts import Messages

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Turns = Literal["last", "all"]
Row = dict[str, list[int]]


class Unanswerable(ValueError):
    """A row cannot be asked.

    Args:
        reason: one of the reasons of answers.py.
        detail: for a reader.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Dialogue(Protocol):
    """One row of a corpus.

    Attributes:
        row: its place in the corpus.
        turns: how many answers it wants.
    """

    row: int
    turns: int

    def ask(self, turn: int) -> tuple[list[int], Messages | None]:
        """The question of a turn, as tokens and, in a conversation, as messages.

        Raises:
            Unanswerable: there is none.
        """

    def take(self, tokens: Sequence[int]) -> None:
        """The target's answer to what was asked last."""

    def rows(self) -> list[Row]:
        """`input_ids` and `labels` of what was answered so far."""


class TokenDialogue:
    """A prompt of tokens, which the target continues."""

    turns = 1

    def __init__(self, row: int, input_ids: Sequence[int]) -> None:
        self.row = row
        self._input_ids = list(input_ids)
        self._rows: list[Row] = []

    def ask(self, turn: int) -> tuple[list[int], Messages | None]:
        """The prompt.

        Raises:
            Unanswerable: it has no tokens.
        """
        if not self._input_ids:
            raise Unanswerable(NO_QUESTION, "the prompt has no tokens")
        return self._input_ids, None

    def take(self, tokens: Sequence[int]) -> None:
        """The continuation."""
        self._rows = [_row(self._input_ids, tokens)]

    def rows(self) -> list[Row]:
        """One row, once it is answered."""
        return self._rows


class ChatDialogue:
    """A conversation; the target answers in the place of its assistant, and is then held to its own
    words: later turns are asked with the target's earlier answers in them.

    Args:
        row: its place in the corpus.
        messages: role and content of each message. What stands last from the assistant is replaced
            by an answer; a user's last message is answered.
        turns: answer the last turn of the assistant, or all of them.
        render: the tokens of messages, ready to be answered.
        decode: the text of an answer's tokens.
    """

    def __init__(
        self,
        row: int,
        messages: Messages,
        turns: Turns,
        render: Callable[[Messages], list[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.row = row
        self._messages = list(messages)
        self._render = render
        self._decode = decode
        places = [i for i, said in enumerate(messages) if said.get("role") == "assistant" and i]
        if messages and messages[-1].get("role") != "assistant":
            places.append(len(messages))
        self._places = places if turns == "all" else places[-1:]
        self.turns = max(len(self._places), 1)  # a row without a question is asked for in vain
        self._asked: list[int] = []
        self._turn = 0
        self._rows: list[Row] = []

    def ask(self, turn: int) -> tuple[list[int], Messages | None]:
        """The conversation up to that turn of the assistant.

        Raises:
            Unanswerable: there is no such turn, or the chat template refuses the messages.
        """
        if not self._places:
            raise Unanswerable(NO_QUESTION, "no message comes before an assistant's turn")
        self._turn = turn
        before = self._messages[: self._places[turn]]
        self._asked = self._render(before)
        return self._asked, before

    def take(self, tokens: Sequence[int]) -> None:
        """The answer, which from now on is what was said."""
        said = {"role": "assistant", "content": self._decode(tokens)}
        place = self._places[self._turn]
        self._messages[place : place + 1] = [said]
        row = _row(self._asked, tokens)
        if self._rows:
            before = self._rows[-1]
            length = len(before["input_ids"])
            if row["input_ids"][:length] == before["input_ids"]:
                # The template leaves earlier turns as they were: one row holds both answers.
                row["labels"][:length] = before["labels"]
                self._rows.pop()
        self._rows.append(row)

    def rows(self) -> list[Row]:
        """One row, or several where the template renders earlier turns in another way later on:
        what was then not the context of an answer is not claimed to be."""
        return self._rows


def _row(prompt: Sequence[int], answer: Sequence[int]) -> Row:
    words = [int(token) for token in answer]
    return {"input_ids": [*prompt, *words], "labels": [IGNORED] * len(prompt) + words}


def read_dialogues(
    corpus: Dataset,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    turns: Turns = "last",
    num_prompts: int | None = None,
    prompt_length: int = 64,
    seed: int = 0,
    template_options: Mapping[str, Any] | None = None,
) -> list[Dialogue]:
    """What a corpus asks, by its columns: `messages`, `prompt`, `input_ids` or `text`.

    Args:
        corpus: conversations in `messages` (and `tools`, where they have any); prompts in `prompt`,
            each a text or a conversation; prompts in `input_ids`; or documents in `text`, from
            which windows are drawn.
        tokenizer: the target's; not needed for `input_ids`.
        turns: of conversations, which turns of the assistant are answered.
        num_prompts: the first so many rows; of documents, so many windows. Default: all rows, 2048
            windows.
        prompt_length: tokens of a window.
        seed: of the draw of windows.
        template_options: further variables of the chat template.

    Raises:
        ValueError: no such column, no rows, or no tokenizer or chat template where one is needed.
    """
    if not len(corpus):
        raise ValueError("the corpus is empty: give one with prompts in it")
    columns = corpus.column_names
    known = ("messages", "prompt", "input_ids", "text")
    column = next((name for name in known if name in columns), None)
    if column is None:
        raise ValueError(f"expected a corpus with one of the columns {list(known)}, got {columns}")
    if column == "text":
        from medusa_heads.data.corpus import prompt_windows

        corpus = prompt_windows(
            corpus,
            _needed(tokenizer, column),
            num_prompts=2048 if num_prompts is None else num_prompts,
            prompt_length=prompt_length,
            seed=seed,
        )
        column = "input_ids"
    elif num_prompts is not None:
        corpus = corpus.select(range(min(num_prompts, len(corpus))))
    if column == "input_ids":
        return [TokenDialogue(row, ids) for row, ids in enumerate(corpus["input_ids"])]
    tokenizer = _needed(tokenizer, column)
    tools = corpus["tools"] if "tools" in columns else [None] * len(corpus)
    dialogues: list[Dialogue] = []
    for row, (asked, available) in enumerate(zip(corpus[column], tools, strict=True)):
        if column == "prompt" and isinstance(asked, str | None):
            asked = asked or ""
            dialogues.append(TokenDialogue(row, tokenizer(asked, verbose=False)["input_ids"]))
            continue
        if not tokenizer.chat_template:
            raise ValueError(
                f"the corpus holds conversations in {column!r}, and the target's tokenizer has no "
                "chat template: give plain prompts, or a tokenizer with a template"
            )
        render = _renderer(tokenizer, available, template_options or {})
        messages = _messages(asked, f"row {row}")
        dialogues.append(ChatDialogue(row, messages, turns, render, _decoder(tokenizer)))
    return dialogues


def _needed(tokenizer: PreTrainedTokenizerBase | None, column: str) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise ValueError(
            f"a corpus with a column {column!r} needs the target's tokenizer, and none lies beside "
            "the target"
        )
    return tokenizer


def _messages(asked: Any, where: str) -> Messages:
    if isinstance(asked, str):  # tables whose messages are of unequal kinds hold them as JSON
        with suppress(ValueError):
            asked = parse_json(asked)
    if asked is None:
        return []
    if not isinstance(asked, list) or not all(isinstance(said, Mapping) for said in asked):
        raise ValueError(
            f"{where}: expected a text, or a list of messages with role and content, got {asked!r}"
        )
    # A column of messages has the fields of all of them; those a message lacks are None.
    return [{name: value for name, value in said.items() if value is not None} for said in asked]


def _renderer(
    tokenizer: PreTrainedTokenizerBase, tools: Any, options: Mapping[str, Any]
) -> Callable[[Messages], list[int]]:
    from jinja2 import TemplateError

    def render(messages: Messages) -> list[int]:
        try:
            rendered: Any = tokenizer.apply_chat_template(
                [dict(said) for said in messages],
                tools=parse_json(tools) if isinstance(tools, str) else tools or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **options,
            )
        except (TemplateError, ValueError, KeyError, TypeError) as error:
            raise Unanswerable(TEMPLATE, str(error)) from error
        return list(rendered)

    return render


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    def decode(tokens: Sequence[int]) -> str:
        text: Any = tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
        return str(text)

    return decode
