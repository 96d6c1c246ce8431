"""Where the end of a text occurred before, kept up to date in amortised constant time a token.

Source: suffix automata (Blumer et al. 1985); for drafting, SAM-Decoding (Hu et al. 2024,
arXiv:2411.10666, section 3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Continuation(NamedTuple):
    """Tokens that followed an earlier occurrence of a text's end; none without a match."""

    match_length: int  # tokens of that end; 0 where there was no such occurrence
    tokens: list[int]
    # Of every token the share of the occurrences that went on with it, of those that had gone on
    # alike so far; less where those were few.
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
        following, end = self._next, self._end
        for token in tokens:
            # The match, made longer by the token, or as much shorter as it takes: before that is
            # part of the text, else it would find itself.
            match, length = self._match, self.match_length
            while match and token not in following[match]:
                match = self._link[match]
                length = self._longest[match]
            self._match = match = following[match].get(token, 0)
            self.match_length = length + 1 if match else 0
            self._append(token)
            match = self._match
            self.match_end = end[match]
            # The latest occurrence is the likeliest to go on alike; the next search finds this one.
            if match:
                end[match] = len(self.text)

    def continuation(self, most: int) -> Continuation:
        """What followed the earlier occurrence, at most so many tokens."""
        if not self.match_length:
            return Continuation(0, [], [])
        tokens = self.text[self.match_end : self.match_end + most]
        return Continuation(self.match_length, tokens, [1.0] * len(tokens))

    def _append(self, token: int) -> None:
        self.text.append(token)
        following, link, longest = self._next, self._link, self._longest
        at = self._last
        self._last = new = len(following)
        following.append({})
        longest.append(longest[at] + 1)
        self._end.append(len(self.text))
        while at >= 0 and token not in following[at]:
            following[at][token] = new
            at = link[at]
        if at < 0:
            link.append(0)
            return
        known = following[at][token]
        if longest[known] == longest[at] + 1:
            link.append(known)
            return
        # The shorter substrings of `known` now end here too, the longer do not: two states.
        clone = new + 1
        link += (clone, link[known])
        link[known] = clone
        following.append(dict(following[known]))
        longest.append(longest[at] + 1)
        self._end.append(self._end[known])
        while at >= 0 and following[at].get(token) == known:
            following[at][token] = clone
            at = link[at]
        if self._match == known and self.match_length <= longest[clone]:
            self._match = clone
