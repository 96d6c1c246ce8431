"""Rows of a corpus as they are being answered: what to ask next, and what was said so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from medusa_heads.config import IGNORED
from medusa_heads.data.chat import ChatTemplate
from medusa_heads.data.data_files import SUFFIXES, has_known_suffix, read_rows
from medusa_heads.data.finding import find_rows
from medusa_heads.files import expanded, parse_json
from medusa_heads.inference.regeneration.answers import NO_QUESTION, TEMPLATE
from medusa_heads.inference.regeneration.prompts import Messages

Turns = Literal["last", "all"]
Row = dict[str, list[int]]


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
        self._asked = list(input_ids)
        self._rows: list[Row] = []

    def ask(self, turn: int) -> tuple[list[int], Messages | None]:
        """The question of a turn, as tokens and, in a conversation, as messages. Raises
        Unanswerable: there is none."""
        if not self._asked:
            raise Unanswerable(NO_QUESTION, "the prompt has no tokens")
        return self._asked, None

    def take(self, tokens: Sequence[int]) -> None:
        """The target's answer to what was asked last."""
        words = [int(token) for token in tokens]
        row = {"input_ids": self._asked + words, "labels": [IGNORED] * len(self._asked) + words}
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
    the assistant is replaced by an answer; a user's last message is answered.
    """

    def __init__(
        self, row: int, messages: Messages, turns: Turns, chat: ChatTemplate, tools: Any = None
    ) -> None:
        super().__init__(row, [])
        self._messages = list(messages)
        self._chat, self._tools = chat, tools
        places = [i for i, said in enumerate(messages) if said.get("role") == "assistant" and i]
        if messages and messages[-1].get("role") != "assistant":
            places.append(len(messages))
        self._places = places if turns == "all" else places[-1:]
        self.turns = max(len(self._places), 1)  # a row without a question is asked for in vain
        self._turn = 0

    def ask(self, turn: int) -> tuple[list[int], Messages | None]:
        """The conversation up to that turn of the assistant."""
        if not self._places:
            raise Unanswerable(NO_QUESTION, "no message comes before an assistant's turn")
        self._turn = turn
        before = self._messages[: self._places[turn]]
        try:
            tools = parse_json(self._tools) if isinstance(self._tools, str) else self._tools or None
            text = self._chat.render([dict(said) for said in before], tools, ask=True)
        except ValueError as error:
            raise Unanswerable(TEMPLATE, str(error.__cause__ or error)) from error
        (self._asked,) = self._chat.encode([text])
        return super().ask(turn)[0], before

    def take(self, tokens: Sequence[int]) -> None:
        """The answer, which from now on is what was said."""
        super().take(tokens)
        ids = [int(token) for token in tokens]
        text = self._chat.tokenizer.decode(ids, skip_special_tokens=True)
        place = self._places[self._turn]
        self._messages[place : place + 1] = [{"role": "assistant", "content": text}]


def read_table(name: str, split: str = "train", *, config: str | None = None) -> Dataset:
    """Find and read a table of prompts, by a name, split and configuration as `find_rows` takes
    them. A text file is one document, and all fields of a .csv are texts. Raises ValueError:
    nothing stands there, it cannot be read, or it has no such split."""

    def refuse(place: str, reason: str) -> None:
        raise ValueError(f"{place}: {reason}")

    path = expanded(name)
    try:
        if path.is_file() and not path.stat().st_size:
            raise ValueError("the file is empty")
        if path.is_file() and not has_known_suffix(path.name):
            raise ValueError(f"its suffix is none of {sorted(SUFFIXES)}")
        if not path.exists() and (path.is_absolute() or name.startswith((".", "~"))):
            raise ValueError("there is nothing")
        found = find_rows(name, split, config)
        if not isinstance(found, list):
            return found
        kinds = {file.name.removesuffix(".gz").rpartition(".")[2] for file in found}
        if kinds <= {"json", "jsonl"} or kinds == {"parquet"}:
            builder = "parquet" if kinds == {"parquet"} else "json"
            return load_dataset(builder, data_files=[str(file) for file in found], split="train")
        # Not through datasets: it takes texts such as "NA" or "7" for something else.
        rows = [row for file in found for _, row in read_rows(file, refuse)]
        if not rows:
            raise ValueError("it has no rows")
        return Dataset.from_list(rows)
    except (ValueError, OSError, DatasetGenerationError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"expected a corpus of prompts at {name!r}: {reason}") from error


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
    """What a corpus asks, by its columns: conversations in `messages` (and `tools`, where they have
    any); prompts in `prompt`, each a text or a conversation; prompts in `input_ids`; or documents
    in `text`, from which windows of `prompt_length` tokens are drawn by the seed. Raises
    ValueError: no such column, no rows, or no tokenizer or chat template where one is needed.

    Args:
        tokenizer: the target's; not needed for `input_ids`.
        turns: of conversations, which turns of the assistant are answered.
        num_prompts: the first so many rows; of documents, so many windows. Default: all, or 2048.
        template_options: further variables of the chat template.
    """
    if not len(corpus):
        raise ValueError("the corpus is empty: give one with prompts in it")
    columns = corpus.column_names
    known = ("messages", "prompt", "input_ids", "text")
    column = next((name for name in known if name in columns), None)
    if column is None:
        raise ValueError(f"expected a corpus with one of the columns {list(known)}, got {columns}")
    if column != "text" and num_prompts is not None:
        corpus = corpus.select(range(min(num_prompts, len(corpus))))
    _check_column(corpus, column)
    if column == "input_ids":
        return [Dialogue(row, ids or []) for row, ids in enumerate(corpus["input_ids"])]
    if tokenizer is None:
        raise ValueError(
            f"a corpus with a column {column!r} needs the target's tokenizer, and none lies beside "
            "the target"
        )
    if column == "text":
        from medusa_heads.data.corpus import draw_windows

        windows = draw_windows(
            [text or "" for text in corpus["text"]],
            tokenizer,
            num_prompts=2048 if num_prompts is None else num_prompts,
            prompt_length=prompt_length,
            seed=seed,
        )
        return [Dialogue(row, ids) for row, (_, ids) in enumerate(windows)]
    chat = None
    tools = corpus["tools"] if "tools" in columns else [None] * len(corpus)
    dialogues: list[Dialogue] = []
    for row, (asked, available) in enumerate(zip(corpus[column], tools, strict=True)):
        if column == "prompt" and isinstance(asked, str | None):
            dialogues.append(Dialogue(row, tokenizer(asked or "", verbose=False)["input_ids"]))
            continue
        if not tokenizer.chat_template:
            raise ValueError(
                f"the corpus holds conversations in {column!r}, and the target's tokenizer has no "
                "chat template: give plain prompts, or a tokenizer with a template"
            )
        chat = chat or ChatTemplate(tokenizer, arguments=template_options or {})
        dialogues.append(ChatDialogue(row, _messages(asked, row), turns, chat, available))
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


def _messages(asked: Any, row: int) -> Messages:
    if isinstance(asked, str):  # tables whose messages are of unequal kinds hold them as JSON
        with suppress(ValueError):
            asked = parse_json(asked)
    if asked is None:
        return []
    if not isinstance(asked, list) or not all(isinstance(said, Mapping) for said in asked):
        raise ValueError(
            f"row {row}: expected a text, or a list of messages with role and content, got "
            f"{asked!r}"
        )
    # A column of messages has the fields of all of them; those a message lacks are None.
    return [{name: value for name, value in said.items() if value is not None} for said in asked]
