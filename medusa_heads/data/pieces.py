"""The text of tokens that come one after the other, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what a tokenizer makes of the first bytes of a character
_BEFORE = 4  # tokens that the first new ones are decoded with


class Pieces:
    """What each new token adds to a text; a character that is not complete waits for the rest.

    Tokens are decoded together with those of the last piece: by itself, some tokenizers would drop
    a token's leading space.

    Args:
        decode: the tokenizer's.
        before: the tokens that the text continues, which are in no piece.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(before)[-_BEFORE:]
        self._shown = len(self._ids)  # of these, so many are in the pieces so far

    def put(self, tokens: Sequence[int]) -> None:
        """The next tokens of the text."""
        self._ids += tokens

    def next(self, *, whole: bool = False) -> str:
        """What the tokens since the last piece add; `whole` at the end of the text, where nothing
        completes a character any more."""
        before, now = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        if len(now) <= len(before) or (now.endswith(UNFINISHED) and not whole):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return now[len(before) :]
