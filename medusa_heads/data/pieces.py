"""The text of tokens that come one after the other, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer makes of the first bytes of a character
_BEFORE = 4  # tokens that the first new ones are decoded with
_BEGINNING = 3  # further ones that may be the beginning of the character that these begin in
_WAITING = 16  # tokens that wait for a character to be complete; of more some are broken for good


def as_written(tokenizer: Any, **options: Any) -> Callable[[list[int]], str]:
    """A tokenizer's decode() with these options, all spaces left: where one before a full stop is
    cleaned away, it depends on which tokens are decoded at once. Where a library in Rust panics, a
    RuntimeError is raised: what it raises itself is no Exception."""

    def decode(ids: list[int]) -> str:
        try:
            return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False, **options))
        except BaseException as fault:
            if isinstance(fault, Exception | KeyboardInterrupt | SystemExit):
                raise
            raise RuntimeError(f"the tokenizer fails on these tokens ({fault})") from None

    return decode


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
        self._ids = _last_characters(decode, before)
        self._shown = len(self._ids)  # of these, so many are in the pieces so far
        self._new: list[int] = []

    def put(self, tokens: Sequence[int]) -> None:
        """The next tokens of the text."""
        self._new += tokens

    def next(self, *, whole: bool = False) -> str:
        """What the tokens since the last piece add; `whole` at the end of the text, where nothing
        completes a character any more."""
        new, self._new = self._new, []
        now = self._decode(self._ids + new)
        if UNFINISHED not in now:
            self._ids += new
            return self._added(now)
        # What is broken may break all that is decoded with it, and so comes by itself.
        piece = ""
        for token in new:
            self._ids.append(token)
            now = self._decode(self._ids)
            if not now.endswith(UNFINISHED):
                piece += self._added(now)
            elif len(self._ids) - self._shown > _WAITING:
                piece += self._broken(now)
        return piece + (self._added(self._decode(self._ids)) if whole else "")

    def _broken(self, now: str) -> str:
        """What the tokens so far add, but for the last few, in which a character may begin; nothing
        where they cannot be taken apart."""
        end = len(self._ids) - _BEGINNING
        for place in range(end, end - _BEGINNING - 1, -1):
            ids, rest = self._ids[:place], self._ids[place:]
            before = self._decode(ids)
            if before + self._decode(rest) == now:
                self._ids = ids
                piece = self._added(before)
                self._ids += rest
                return piece
        return ""

    def _added(self, now: str) -> str:
        """What the text of the tokens so far adds to the last piece."""
        before = self._decode(self._ids[: self._shown])
        if not now.startswith(before):
            if now.startswith(begun := before.rstrip(UNFINISHED)):
                before = begun  # of a character that is complete now
            elif UNFINISHED in now:
                # Some decoders take a run of bytes for broken as a whole, with what was shown.
                before, now = "", self._decode(self._ids[self._shown :])
        if len(now) <= len(before):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return now[len(before) :]


def _last_characters(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[int]:
    """The last few tokens, from the beginning of a character on if there is one near: with half of
    one, some decoders take all bytes up to the next other token for broken."""
    for count in range(_BEFORE, _BEFORE + _BEGINNING + 1):
        found = list(ids[-count:])
        if not decode(found).startswith(UNFINISHED):
            return found
    return list(ids[-_BEFORE:])
