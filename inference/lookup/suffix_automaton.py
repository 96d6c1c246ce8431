"""Where the end of a text occurred before, kept up to date in amortised constant time a token.

Source: suffix automata (Blumer et al. 1985); for drafting, SAM-Decoding (Hu et al. 2024,
arXiv:2411.10666, section 3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Continuation(NamedTuple):
    """Tokens that followed an earlier occurrence of a text's end; none without a match.

    Attributes:
        match_length: tokens of that end; 0 where there was no such occurrence.
        shares: of every token the share of the occurrences that went on with it, of those that had
            gone on alike so far; less where those were few.
    """

    match_length: int
    tokens: list[int]
    shares: list[float]


class SuffixAutomaton:
    """The text so far, and its longest suffix that also occurs earlier in it.

    Attributes:
        text: token ids read so far.
        match_length: tokens of that suffix; 0 where even the last token is new.
        match_end: in `text`, the place behind the suffix's latest known earlier occurrence: what
            followed it there is the draft.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self.match_length = 0
        self.match_end = 0
        # State 0 is the empty string. A state stands for all substrings that end at the same
        # places: `_longest` is the longest one's length, `_link` the state of its longest suffix
        # that also ends elsewhere, `_end` a place behind one of its occurrences.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._longest = [0]
        self._end = [0]
        self._last = 0
        self._match = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Read more of the text."""
        for token in tokens:
            self._follow(token)  # before it is part of the text: else it would find itself
            self._append(token)
            self._remember()

    def continuation(self, most: int) -> Continuation:
        """What followed the earlier occurrence, at most so many tokens."""
        if not self.match_length:
            return Continuation(0, [], [])
        tokens = self.text[self.match_end : self.match_end + most]
        return Continuation(self.match_length, tokens, [1.0] * len(tokens))

    def _follow(self, token: int) -> None:
        """The match, made longer by `token`, or as much shorter as it takes."""
        while self._match and token not in self._next[self._match]:
            self._match = self._link[self._match]
            self.match_length = self._longest[self._match]
        self._match = self._next[self._match].get(token, 0)
        self.match_length = self.match_length + 1 if self._match else 0

    def _append(self, token: int) -> None:
        self.text.append(token)
        new = self._state(self._longest[self._last] + 1)
        at, self._last = self._last, new
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        if at < 0:
            self._link[new] = 0
            return
        known = self._next[at][token]
        if self._longest[known] == self._longest[at] + 1:
            self._link[new] = known
            return
        # The shorter substrings of `known` now end here too, the longer do not: two states.
        clone = self._state(self._longest[at] + 1)
        self._next[clone] = dict(self._next[known])
        self._link[clone], self._end[clone] = self._link[known], self._end[known]
        while at >= 0 and self._next[at].get(token) == known:
            self._next[at][token] = clone
            at = self._link[at]
        self._link[known] = self._link[new] = clone
        if self._match == known and self.match_length <= self._longest[clone]:
            self._match = clone

    def _remember(self) -> None:
        self.match_end = self._end[self._match]
        # The latest occurrence is the likeliest to go on alike; the next search finds this one.
        if self._match:
            self._end[self._match] = len(self.text)

    def _state(self, longest: int) -> int:
        self._next.append({})
        self._link.append(-1)
        self._longest.append(longest)
        self._end.append(len(self.text))
        return len(self._next) - 1
