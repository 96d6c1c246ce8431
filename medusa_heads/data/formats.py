"""The forms in which a corpus holds its text, recognised by their columns.

Whatever the form, a row becomes one of four things: a `Document`, a `Completion` of a prompt, a
`Conversation`, or `Tokens` that are ready. A row that only asks may also be a `Question`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from medusa_heads.config import IGNORED
from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.images import IMAGES_COLUMN, Source, with_images
from medusa_heads.data.messages import SPEAKERS, SYSTEM_COLUMN, behind_system, messages_of, tools_of
from medusa_heads.files import parse_json

CONTEXT_COLUMN = "_context"
"""Of a table of conversations: how many messages at the start are not learnt from."""

DOCUMENT_COLUMN = "document"
"""Of a table of tokens: which rows are parts of one document, and are held out together."""

MASK_COLUMN = "attention_mask"
"""Of a table of tokens: 0 where there is padding."""

PADDED_LEFT = (
    f"{MASK_COLUMN} begins with 0, and padding on the left would be read as text: give rows "
    "without padding"
)
PADDED_LEARNT = f"{MASK_COLUMN} is 0 where labels tell what to learn: set them to {IGNORED} there"

LARGEST_TOKEN = 2**31 - 1  # tables of tokens have 32 bits for each


@dataclass(frozen=True)
class Document:
    """Plain text: every token is learnt."""

    text: str


@dataclass(frozen=True)
class Completion:
    """A prompt, and the text after it that is learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template; what the assistant says after the first `context` of them is
    learnt. The images are those of their parts, in order."""

    messages: list[dict[str, Any]]
    context: int = 0
    tools: list[Any] | None = None
    images: list[Source] = field(default_factory=list)


@dataclass(frozen=True)
class Tokens:
    """Token ids, labels of the same length, and the document they are a part of, where it has a
    number or a name."""

    input_ids: list[int]
    labels: list[int]
    document: int | str | None = None


@dataclass(frozen=True)
class Question:
    """A prompt without an answer: a text."""

    prompt: str


@dataclass(frozen=True)
class QuestionTokens:
    """A prompt without an answer: token ids."""

    input_ids: list[int]


Content = Document | Completion | Conversation | Tokens | Question | QuestionTokens


@dataclass(frozen=True)
class Format:
    """One form: what it holds, the columns it is read from, and the folder in which relative paths
    of images start."""

    name: str
    columns: tuple[str, ...]
    folder: str | None = None

    def __str__(self) -> str:
        return " + ".join(self.columns)

    def read(self, row: Mapping[str, Any], *, filled: bool = True) -> Content:
        """What a row says; a BadRow where a column is missing, empty or of another type, or a role
        is unknown. `filled`: its mappings are of a table, where None stands for an absent key."""
        for column in self.columns:
            if row.get(column) is None:
                raise BadRow(f"no {column!r}")
        first = self.columns[0]
        if self.name == "tokens":
            ids, labels = (_token_ids(row[column], column) for column in self.columns)
            _refuse_padding(row.get(MASK_COLUMN), labels)
            return Tokens(ids, labels, row.get(DOCUMENT_COLUMN))
        if self.name == "question tokens":
            return QuestionTokens(_token_ids(row[first], first))
        if self.name == "question" and is_plain(row[first]):
            return Question(row[first])
        if self.name == "text":
            return Document(_text(row[first], first))
        if self.name in ("question", "questions", "messages"):
            learnt = self.name == "messages"
            say_something = SPEAKERS if learnt else ("user",)
            messages = messages_of(row[first], first, say_something, filled=filled, shown=learnt)
            if first == "conversations":
                messages = behind_system(messages, row.get(SYSTEM_COLUMN))
            return self._talk(row, messages, row.get(CONTEXT_COLUMN) or 0, filled, shown=learnt)
        strings = [isinstance(row[column], str) for column in self.columns]
        texts = [is_plain(row[column]) for column in self.columns]
        if all(strings) and any(texts):
            return Completion(row["prompt"], _text(row["completion"], "completion"))
        if any(texts):
            raise BadRow(
                "'prompt' and 'completion' are of two kinds, a text and a list of messages"
            )
        context, answer = (
            messages_of(row[column], column, filled=filled, shown=True) for column in self.columns
        )
        return self._talk(row, context + answer, len(context), filled, shown=True)

    def _talk(
        self,
        row: Mapping[str, Any],
        messages: list[dict[str, Any]],
        unlearnt: int,
        filled: bool,
        *,
        shown: bool,
    ) -> Conversation:
        tools = tools_of(row.get("tools"), filled=filled)
        given = row.get(IMAGES_COLUMN) if shown else None
        messages, images = with_images(messages, given, self.folder)
        return Conversation(messages, unlearnt, tools, images)


FORMATS = (
    Format("tokens", ("input_ids", "labels")),
    Format("messages", ("messages",)),
    Format("messages", ("conversations",)),
    Format("prompt/completion", ("prompt", "completion")),
    Format("text", ("text",)),
)
"""Of what is learnt from."""

QUESTIONS = (
    Format("questions", ("messages",)),
    Format("questions", ("conversations",)),
    Format("question", ("prompt",)),
    Format("question tokens", ("input_ids",)),
    Format("text", ("text",)),
)
"""Of what the target is asked. Messages of an assistant may be empty: it answers anew."""


def recognise(
    columns: Collection[str], text_column: str | None = None, known: Sequence[Format] = FORMATS
) -> Format:
    """The format of a corpus with these columns; of several, the one that says most; a ValueError
    where it is none of them."""
    if text_column is not None:
        if text_column not in columns:
            raise ValueError(
                f"expected a column {text_column!r} (text_column), got {sorted(columns)}"
            )
        return Format("text", (text_column,))
    for one in known:
        if set(one.columns) <= set(columns):
            return one
    if known is not FORMATS:
        names = [str(one) for one in known]
        raise ValueError(f"expected a corpus with one of the columns {names}, got {[*columns]}")
    raise ValueError(
        "expected a corpus with a column 'messages', 'conversations' or 'text', or with 'prompt' "
        f"and 'completion', or with 'input_ids' and 'labels', got {sorted(columns)}: rename a "
        "column, or name the one that holds plain text with text_column"
    )


def plain_columns(content: Content) -> dict[str, Any]:
    """The same as columns whose types are equal in every row, as tables need it."""
    columns = dict(vars(content))
    if isinstance(content, Conversation):
        texts = {"messages": content.messages, "tools": content.tools or None}
        for name, value in texts.items():
            # Messages may have times beside their texts, and whatever else a table holds.
            columns[name] = value and json.dumps(value, ensure_ascii=False, default=_in_json)
        columns[CONTEXT_COLUMN] = columns.pop("context")
    elif isinstance(content, Tokens):
        document = columns.pop("document")
        columns[DOCUMENT_COLUMN] = None if document is None else str(document)
    return columns


def _in_json(value: Any) -> float | str:
    return float(value) if isinstance(value, Decimal) else str(value)


def is_plain(value: Any) -> bool:
    """Whether a prompt is a text, and not one that holds messages in JSON."""
    if not isinstance(value, str):
        return False
    try:
        found = parse_json(value) if value.lstrip().startswith("[") else None
    except ValueError:
        return True
    return not found or not all(
        isinstance(message, Mapping) and not message.keys().isdisjoint(("role", "from"))
        for message in found
    )


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{column!r} is of type {type(value).__name__}, expected a text")
    if not value.strip():
        raise BadRow(f"{column!r} is empty")
    return value


def _refuse_padding(mask: Any, labels: Sequence[int]) -> None:
    if isinstance(mask, Sequence) and len(mask) == len(labels):
        if mask[0] == 0:
            raise BadRow(PADDED_LEFT)
        if any(one == 0 and label != IGNORED for one, label in zip(mask, labels, strict=True)):
            raise BadRow(PADDED_LEARNT)


def _token_ids(value: Any, column: str) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRow(f"{column!r} is of type {type(value).__name__}, expected a list of integers")
    if any(not isinstance(token, int) or isinstance(token, bool) for token in value):
        raise BadRow(f"{column!r} holds something else than integers")
    if not value:
        raise BadRow(f"{column!r} is empty")
    for token in value:
        if abs(token) > LARGEST_TOKEN:
            raise BadRow(f"{column!r} holds {token}, which no vocabulary reaches")
    return list(value)
