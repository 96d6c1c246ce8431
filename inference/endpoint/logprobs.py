"""Log-probabilities of the tokens of a text, by the target's own logits, and their form in answers.

They are the log-softmax of the logits in fp32, before temperature, penalties and whatever else says
what is drawn.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from medusa_heads.data.pieces import UNFINISHED

MOST = 20
"""Likeliest tokens that are told of each."""
_AT_ONCE = 64  # tokens of a prompt
_LEAST = -9999.0  # what OpenAI says of tokens that have none; JSON has no infinity


class Weighed(NamedTuple):
    """A token with its text and its log-probability, and the likeliest ones in its place; `offset`
    is where it begins in the text, in characters. The first token of a prompt has a text alone."""

    token: str
    logprob: float | None
    top: list[tuple[str, float]]
    offset: int


class Weights(NamedTuple):
    """The same by token ids."""

    logprob: float
    top: list[tuple[int, float]]

    @classmethod
    def of(cls, logits_TV: Tensor, tokens: Sequence[int], count: int) -> list[Weights]:
        """Of tokens that these logits were read for, and of so many likeliest ones each."""
        made = []
        for start in range(0, len(tokens), _AT_ONCE):
            logprobs_TV = logits_TV[start : start + _AT_ONCE].float().log_softmax(dim=-1)
            likeliest = logprobs_TV.topk(min(count, logprobs_TV.shape[1]))
            tops = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
            for logprobs_V, token, (ids, values) in zip(
                logprobs_TV, tokens[start : start + _AT_ONCE], tops, strict=True
            ):
                top = zip(ids, map(_said, values), strict=True)
                made.append(cls(_said(logprobs_V[token].item()), list(top)))
        return made

    def named(self, name: Callable[[int], str], token: int, length: int, piece: str) -> Weighed:
        """With texts in place of ids; `piece` is what the token has added to a text of this length,
        a broken character before it included."""
        said = name(token)
        offset = length + (len(piece) - len(said) if piece.endswith(said) else 0)
        return Weighed(said, self.logprob, [(name(i), p) for i, p in self.top], offset)


def names_behind(decode: Callable[[list[int]], str], before: list[int]) -> Callable[[int], str]:
    """What a token adds behind others: by itself some tokenizers drop its leading space."""
    first = decode(before)

    @cache  # a token is most often one of the likeliest in its place
    def name(token: int) -> str:
        try:
            both = decode([*before, token])
        except Exception:  # only the target has it, in a padded vocabulary
            return ""
        if UNFINISHED in both or not both.startswith(first):
            return decode([token])
        return both[len(first) :]

    return name


def of_completion(weighed: Sequence[Weighed]) -> dict[str, Any]:
    """As a choice of a completion has them."""
    return {
        "tokens": [each.token for each in weighed],
        "token_logprobs": [each.logprob for each in weighed],
        "top_logprobs": [None if each.logprob is None else _by_text(each) for each in weighed],
        "text_offset": [each.offset for each in weighed],
    }


def of_chat(weighed: Sequence[Weighed]) -> dict[str, Any]:
    """As a choice of a conversation has them."""
    content = [
        _entry(each.token, each.logprob) | {"top_logprobs": [_entry(*top) for top in each.top]}
        for each in weighed
    ]
    return {"content": content, "refusal": None}


def _by_text(weighed: Weighed) -> dict[str, float | None]:
    """The likeliest ones and the token itself; where two have the same text, the likelier."""
    found: dict[str, float | None] = {}
    for token, logprob in [*weighed.top, (weighed.token, weighed.logprob)]:
        found.setdefault(token, logprob)
    return found


def _entry(token: str, logprob: float | None) -> dict[str, Any]:
    # Of a part of a character there is no text that would have its bytes.
    raw = None if UNFINISHED in token else list(token.encode(errors="replace"))
    return {"token": token, "logprob": logprob, "bytes": raw}


def _said(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST  # NaN is not
