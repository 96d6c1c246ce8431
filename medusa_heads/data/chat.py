"""Which tokens of a conversation an assistant writes itself, exact to the token.

A chat template says nothing about that, so each turn is rendered twice: as the prompt that asks for
it, and with it. What the second has beyond the first, up to the token that ends the turn, is what
the model generates. All comparisons are of token ids, never of characters: a tokenizer may merge
across the border, and the model would then see other tokens than it was trained on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.encoding import Ragged, begins, is_blank, special_ids
from medusa_heads.data.formats import Conversation
from medusa_heads.data.messages import parted, with_arguments, without_calls
from medusa_heads.data.turns import LearntRows, end_of_turns, replaced, rows_of_turns
from medusa_heads.files import half_character

# What a template's code may raise on a row that it was not made for.
_TEMPLATE_FAULTS = (
    ValueError, TypeError, LookupError, AttributeError,
    ArithmeticError, RecursionError,
)  # fmt: skip

_PROBE = {"role": "user", "content": "medusa"}
_DEVELOPED = ({**_PROBE, "role": "developer"}, {"role": "user", "content": "x"})
_ARGUMENTS = {"x": "y"}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": _ARGUMENTS}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


class Rendered(NamedTuple):
    """A conversation as its template writes it: which messages are learnt, and of each the prompt
    that asks for it, and the same with its text."""

    spoken: list[int]
    asked: list[str]
    answered: list[str]


@dataclass
class ChatTemplate:
    """A tokenizer's chat template, and what it is told."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None  # a Jinja text instead of the tokenizer's own
    arguments: Mapping[str, Any] = field(default_factory=dict)  # besides the messages
    # Tokens that end the target's generation. Without them, the first special token after a turn's
    # text is taken for its end.
    stop_ids: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.template is None and not self.tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, which conversations need: give one with "
                "chat_template"
            )
        self._special = special_ids(self.tokenizer)
        # Templates of models that also see images may take texts for lists, and write nothing.
        self._takes_parts = self._writes(parted(_PROBE)) and not self._writes(_PROBE)

    def _writes(self, *messages: Mapping[str, Any]) -> bool:
        """Whether the text of the first message is in what the template makes of them."""
        return _PROBE["content"] in (self._made_of(*messages) or "")

    @cached_property
    def _knows_developers(self) -> bool:
        as_taken = parted if self._takes_parts else dict[str, Any]
        return self._writes(*(as_taken(message) for message in _DEVELOPED))

    def _made_of(self, *messages: Mapping[str, Any]) -> str | None:
        """What the template makes of messages as they are, if it takes them."""
        try:
            return str(self._apply([*messages], None, ask=True))
        except (TemplateError, *_TEMPLATE_FAULTS):
            return None

    @cached_property
    def _calls_in_text(self) -> bool:
        """Whether the template takes arguments of calls as texts in JSON alone: it refuses objects,
        or writes them as Python does."""
        asked = parted(_PROBE) if self._takes_parts else _PROBE
        made = self._made_of(asked, _CALLING)
        if made is not None:
            return str(_ARGUMENTS) in made
        return self._made_of(asked, with_arguments(_CALLING, as_text=True)) is not None

    def render(self, messages: Sequence[Any], tools: list[Any] | None, *, ask: bool) -> str:
        """Messages as text, with the beginning of an answer where one is asked for; a BadRow where
        the template refuses them, or the text has no tokens."""
        try:
            text = str(self._written(list(messages), tools, ask))
        except (TemplateError, *_TEMPLATE_FAULTS) as error:
            raise BadRow(f"the chat template refuses it ({error})") from error
        if half_character(text) is not None:  # JSON within a table can spell what the table cannot
            raise BadRow("it holds half a character (a surrogate), which has no tokens")
        return text

    def _written(self, messages: list[Any], tools: list[Any] | None, ask: bool) -> Any:
        """A conversation as text, or each of a list of them."""
        told = [
            [*map(self._told, each)] if isinstance(each, list) else self._told(each)
            for each in messages
        ]
        return self._apply(told, tools, ask)

    def _told(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message in the form that the template takes."""
        if message.get("tool_calls"):
            message = with_arguments(message, as_text=self._calls_in_text)
        if message["role"] == "developer" and not self._knows_developers:
            message = {**message, "role": "system"}  # or templates such as Qwen's leave it out
        return parted(message) if self._takes_parts else message

    def _apply(self, messages: list[Any], tools: list[Any] | None, ask: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self.template,
            add_generation_prompt=ask,
            tokenize=False,
            **self.arguments,
        )

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered texts, in which the template has written the special tokens."""
        # verbose=False: they may be longer than the model's maximum, and are cut later
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        return encoded["input_ids"]

    def rendered(self, conversations: Sequence[Conversation]) -> list[Rendered | BadRow]:
        """What `rows` encodes of many conversations; in place of some, why there is nothing."""
        spoken = [_spoken(each) for each in conversations]
        turns = [
            (each, index)
            for each, indices in zip(conversations, spoken, strict=True)
            if not isinstance(indices, BadRow)
            for index in indices
        ]
        prompts = [(each.messages[:index], each.tools) for each, index in turns]
        texts = [(each.messages[: index + 1], each.tools) for each, index in turns]
        asked = iter(self._all_rendered(prompts, ask=True))
        answered = iter(self._all_rendered(texts, ask=False))
        found: list[Rendered | BadRow] = []
        for each, indices in zip(conversations, spoken, strict=True):
            if isinstance(indices, BadRow):
                found.append(indices)
                continue
            pair: list[list[Any]] = [[next(texts) for _ in indices] for texts in (asked, answered)]
            refused = (text for text in chain(*pair) if isinstance(text, BadRow))
            made = next(refused, None) or Rendered(indices, *pair)
            if isinstance(made, Rendered):
                for index, before, text in zip(*made, strict=True):
                    silent = without_calls(each.messages[index], text.removeprefix(before))
                    talk = [([*each.messages[:index], silent], each.tools)]
                    if silent and self._all_rendered(talk, ask=False) == [text]:
                        made = BadRow(
                            f"the chat template leaves out the calls of message {index}: give a "
                            "chat_template that writes them"
                        )
                        break
            found.append(made)
        return found

    def _all_rendered(
        self, talks: Sequence[tuple[list[Any], list[Any] | None]], *, ask: bool
    ) -> list[str | BadRow]:
        if talks and all(tools is None for _, tools in talks):
            try:
                texts = self._written([messages for messages, _ in talks], None, ask)
            except (TemplateError, *_TEMPLATE_FAULTS):
                pass  # one of them; each is asked below
            else:
                if not any(half_character(text) is not None for text in texts):
                    return list(texts)
        found: list[str | BadRow] = []
        for messages, tools in talks:
            try:
                found.append(self.render(messages, tools, ask=ask))
            except BadRow as problem:
                found.append(problem)
        return found

    def rows_of(
        self, rendered: Sequence[Rendered], encoded: Ragged
    ) -> tuple[LearntRows, dict[int, str]]:
        """Rows of conversations, each by its number, from the token ids of the prompts and then of
        the texts of one after the other; and why those of some numbers have none. A conversation is
        one row, where the template never rewrites what it has rendered before, else as few rows as
        hold each turn with the context it answers. Text after the last turn is left out: nothing is
        learnt from it."""
        counts = np.fromiter((len(each.spoken) for each in rendered), np.int64, len(rendered))
        sources = np.repeat(np.arange(len(rendered)), counts)
        places_asked = np.arange(len(sources)) + np.repeat(np.cumsum(counts) - counts, counts)
        asked, ids = encoded.take(places_asked), encoded.take(places_asked + counts[sources])
        turns = [turn for each in rendered for turn in zip(*each, strict=True)]
        problems: dict[int, str] = {}  # of turns

        merged = []
        for turn in np.flatnonzero(~begins(asked.stretches, ids.stretches)).tolist():
            index, before, text = turns[turn]
            try:
                joined = self._continued(before, asked.row(turn), text, ids.row(turn), index)
            except BadRow as problem:
                problems[turn] = str(problem)
            else:
                merged.append((turn, joined))
        ids = replaced(ids, merged)
        starts = np.minimum(asked.lengths, ids.lengths)
        blank = partial(is_blank, self.tokenizer)
        ends = end_of_turns(ids, starts, self.stop_ids, self._special, blank)
        for turn in np.flatnonzero(ends == starts).tolist():
            nothing = f"the chat template renders nothing of message {turns[turn][0]}"
            problems.setdefault(turn, nothing)
        of_source = {int(sources[turn]): problems[turn] for turn in sorted(problems, reverse=True)}
        kept = np.flatnonzero(~np.isin(sources, list(of_source)))
        rows = rows_of_turns(ids.take(kept), starts[kept], ends[kept], sources[kept], self.stop_ids)
        return rows, of_source

    def _continued(
        self, before: str, before_ids: list[int], text: str, ids: list[int], index: int
    ) -> list[int]:
        if not text.startswith(before):
            alike = [a == b for a, b in zip(before, text, strict=False)]
            missing = before[[*alike, False].index(False) :][-40:]
            raise BadRow(
                f"the chat template asks for message {index} with {missing!r}, and then renders it "
                "without: no token of it can be told from the prompt; give another chat_template "
                "or chat_template_kwargs"
            )
        joined = continuation(self.tokenizer, before_ids, text[len(before) :], ids)
        if joined is None:
            raise BadRow(
                f"the tokenizer merges the prompt with the start of message {index}, and the two "
                "cannot be taken apart"
            )
        return joined


def _spoken(conversation: Conversation) -> list[int] | BadRow:
    """Which messages are learnt, or why none can be."""
    found = [
        index
        for index, message in enumerate(conversation.messages)
        if message["role"] == "assistant"
        and index >= conversation.context
        and message.get("weight") != 0
    ]
    if not found:
        return BadRow("no message of an assistant to learn from")
    if found[0] == 0:
        return BadRow("it begins with an assistant's message, which no prompt asks for")
    return found


def ask_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Any],
    arguments: Mapping[str, Any] | None = None,
    tools: list[Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, ready to be answered; `arguments` and `tools` are told the
    template. Raises BadRow: the template refuses it, or makes no tokens of it."""
    template = ChatTemplate(tokenizer, arguments=arguments or {})
    (ids,) = template.encode([template.render(messages, tools, ask=True)])
    if not ids:
        raise BadRow("the chat template makes no tokens of it: say something")
    return ids


def continuation(
    tokenizer: PreTrainedTokenizerBase, before_ids: list[int], text: str, whole_ids: list[int]
) -> list[int] | None:
    """Token ids of `before_ids` continued by `text` as a model writes on, where tokenising both
    together would merge across the border and give `whole_ids`; None if none keep the text."""
    return written_on(tokenizer, before_ids, text, str(tokenizer.decode(whole_ids)))


def written_on(
    tokenizer: PreTrainedTokenizerBase, before_ids: list[int], text: str, whole: str
) -> list[int] | None:
    """The same where both together spell `whole`."""
    # Some tokenizers put a space before all that they are given, but not behind a line break, or,
    # where that merges with a further one, behind a letter.
    for anchor in ("", "\n", "a"):
        anchor_ids = tokenizer(anchor, add_special_tokens=False)["input_ids"] if anchor else []
        ids = tokenizer(anchor + text, add_special_tokens=False, verbose=False)["input_ids"]
        joined = before_ids + ids[len(anchor_ids) :]
        if ids[: len(anchor_ids)] == anchor_ids and tokenizer.decode(joined) == whole:
            return joined
    return None
