"""What servers say, in the target's tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from medusa_heads.inference.regeneration.prompts import Prompt

SHOWN = 200  # characters of a server's own words


def spelling(tokenizer: Any, prompt: Prompt, text: str) -> list[int] | None:
    """The tokens of an answer, None where they would not spell it.

    Tokenised behind the prompt, where tokenizers put no space of their own before the first
    word; alone only where prompt and answer would melt into one token.
    """
    decode = partial(
        tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    encode = partial(tokenizer, add_special_tokens=False, verbose=False)
    asked = [int(token) for token in prompt.input_ids]
    before = decode(asked)
    whole = encode(before + text)["input_ids"]
    tokens: list[int] = whole[len(asked) :]
    if whole[: len(asked)] != asked:
        tokens = encode(text)["input_ids"]
    return tokens if tokens and decode([*asked, *tokens]) == before + text else None


def complaint(reply: Any) -> str:
    """What a server says is wrong."""
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        reply = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(reply).split())[:SHOWN]
