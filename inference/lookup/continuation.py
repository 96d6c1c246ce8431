"""What may follow a text, by where its end occurred before."""

from __future__ import annotations

from typing import NamedTuple


class Continuation(NamedTuple):
    """Tokens that followed an earlier occurrence of a text's end.

    Attributes:
        match_length: tokens of that end; 0 where there was no such occurrence.
        tokens: what followed, none without a match.
        shares: of every token the share of the occurrences that went on with it, of those that had
            gone on alike so far; less where those were few.
    """

    match_length: int
    tokens: list[int]
    shares: list[float]
