"""N-grams by their first token, the latest first."""

from __future__ import annotations

from collections.abc import Sequence


class NgramPool:
    """Of every token the n-grams that began with it last.

    Args:
        size: tokens of an n-gram.
        most: n-grams kept of each token; the longest unused are forgotten.
    """

    def __init__(self, size: int, most: int) -> None:
        assert size > 1 and most > 0
        self._size = size
        self._most = most
        self._behind: dict[int, dict[tuple[int, ...], None]] = {}  # in order, the latest last

    def add(self, ngram: Sequence[int]) -> None:
        """Keep an n-gram, or make it the latest again."""
        assert len(ngram) == self._size
        known = self._behind.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def behind(self, token: int) -> list[tuple[int, ...]]:
        """What followed the token in its n-grams, the latest first."""
        return list(reversed(self._behind.get(token, {})))
