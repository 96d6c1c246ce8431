"""Between words and tokens: what servers say, and answers that a conversation goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.chat import ChatTemplate, written_on
from medusa_heads.data.encoding import special_ids
from medusa_heads.inference.regeneration.prompts import Prompt

SHOWN = 200  # characters of a server's own words
BROKEN_CHARACTER = "\ufffd"  # what stands in a text for bytes that are no character


def spelling(tokenizer: Any, prompt: Prompt, text: str) -> list[int] | None:
    """The tokens of an answer, None where they would not spell it, as those of a broken character:
    the target wrote others, and the text does not say which. Tokenised behind the prompt, where
    tokenizers put no space of their own before the first word; alone, or behind a line break, where
    the prompt would get other tokens than it has."""
    if BROKEN_CHARACTER in text:
        return None
    decode = partial(
        tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    asked = [int(token) for token in prompt.input_ids]
    before = decode(asked)
    whole = tokenizer(before + text, add_special_tokens=False, verbose=False)["input_ids"]
    if whole[: len(asked)] != asked or decode(whole) != before + text:
        whole = written_on(tokenizer, asked, text, before + text) or asked
    return whole[len(asked) :] or None


def ends_of_answers(chat: ChatTemplate, ends: Sequence[int]) -> list[int]:
    """The tokens that end a target's text, first the one that its chat template writes behind an
    answer, if it is among them: tokenizers may name another, as Gemma's does."""
    asked, said = ({"role": role, "content": "Hello"} for role in ("user", "assistant"))
    try:
        texts = (
            chat.render([asked], None, ask=True),
            chat.render([asked, said, asked], None, ask=False),
        )
    except BadRow:  # a template may want more than these
        return [*ends]
    prompt, whole = chat.encode([*texts])
    # A prompt may open a thought, which no earlier turn has.
    alike = [a == b for a, b in zip(prompt, whole, strict=False)]
    behind = whole[[*alike, False].index(False) :]
    written = next((token for token in behind if token in ends), None)
    return sorted(ends, key=lambda token: token != written)


def complaint(reply: Any) -> str:
    """What a server says is wrong."""
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        reply = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(reply).split())[:SHOWN]


class OwnWords:
    """Reads a target's answers as messages, with its tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._special = tokenizer, special_ids(tokenizer)

    def message(
        self, asked: Sequence[int], tokens: Sequence[int], tools: list[Any] | None
    ) -> dict[str, Any]:
        """The message that an answer is. Special tokens within it, such as those before a channel
        or a call of a tool, are no text: the tokenizer's own parser reads them. Raises ValueError:
        it has none, or that cannot."""
        ids = [int(token) for token in tokens]
        text = ids[:-1] if ids and ids[-1] in self._special else ids  # the end is no text either
        inside = next((token for token in text if token in self._special), None)
        decode = partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
        if inside is None:
            return {"role": "assistant", "content": decode(text)}
        what = f"it holds special tokens such as {decode([inside])!r}"
        if getattr(self._tokenizer, "response_template", None) is None:
            raise ValueError(f"{what}, and the tokenizer has no response_template to read them by")
        before = decode([int(token) for token in asked])
        try:
            read = self._tokenizer.parse_response(decode(ids), prefix=before, tools=tools)
            return {"role": "assistant", "content": "", **read}
        except Exception as error:  # a template is a target's own, and may be wrong in any way
            raise ValueError(
                f"{what}, and the tokenizer's response_template cannot read it ({error})"
            ) from error
