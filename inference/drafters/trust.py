"""How far drafts can be believed here: learnt from what the target wrote behind earlier ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from medusa_heads.inference.continuation import Continuation
from medusa_heads.prefix_tree import PrefixTree

_BOUNDS = (2, 3, 4, 6, 10, 16, 32)  # from these lengths of a match on, it is believed more
_PRIOR = (0.3, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
_PRIOR_WEIGHT = 4.0
_NEGLIGIBLE = 0.01  # a chance that no node is verified for
_FORGET = 0.995  # what was seen two hundred drafts ago counts little
_FORGIVE = 0.997  # drafts that are not made are slowly believed again, so that they are tried again


class SuffixTrust:
    """How often what followed earlier occurrences followed again, over the share of them that it
    had followed, by the length of the match."""

    def __init__(self) -> None:
        self._hits = [_PRIOR_WEIGHT * chance for chance in _PRIOR]
        self._shares = [_PRIOR_WEIGHT] * len(_PRIOR)

    def chances(self, found: Continuation) -> list[float]:
        """The chance that the first 1, 2, .. tokens of a continuation are all right, as long as it
        is worth a thought. With each token that is, the match is one longer."""
        chances, chance = [], 1.0
        for length, share in enumerate(found.shares, found.match_length):
            level = bisect_right(_BOUNDS, length)
            chance *= min(share * self._hits[level] / self._shares[level], 1.0)
            if chance < _NEGLIGIBLE:
                break
            chances.append(chance)
        return chances

    def learn(self, found: Continuation, committed: Sequence[int]) -> None:
        """Compare what a match promised with what the target wrote."""
        drafts = zip(found.tokens, found.shares, committed, strict=False)
        for length, (drafted, share, true) in enumerate(drafts, found.match_length):
            level = bisect_right(_BOUNDS, length)
            self._shares[level] = _FORGET * self._shares[level] + share
            self._hits[level] = _FORGET * self._hits[level] + (drafted == true)
            if drafted != true:
                return


class Belief:
    """How many drafted tokens were accepted, over how many were promised."""

    def __init__(self) -> None:
        self._accepted = self._promised = _PRIOR_WEIGHT

    @property
    def factor(self) -> float:
        """By what promises are to be multiplied; never more than they say."""
        return min(self._accepted / self._promised, 1.0)

    def learn(self, promised: float, accepted: int) -> None:
        """What one step's drafts promised, and how many of them were accepted."""
        self._promised = _FORGET * self._promised + promised
        self._accepted = _FORGET * self._accepted + accepted

    def forgive(self) -> None:
        """A step for which nothing was drafted."""
        self._accepted = self._promised - _FORGIVE * (self._promised - self._accepted)


class TreeTrust:
    """How often trees hold the next token, over how often their own chances say they do, by depth.

    Chances are measured on held-out text; under another temperature, or on text of another kind,
    fewer or more drafts are accepted.
    """

    def __init__(self) -> None:
        self._hits: list[float] = []
        self._expected: list[float] = []

    def factors(self, levels: int) -> list[float]:
        """By what the chance of a path of depth 0, 1, .. `levels` is to be multiplied."""
        self._grow(levels)
        factors = [1.0]
        for hits, expected in zip(self._hits, self._expected, strict=True):
            factors.append(factors[-1] * hits / expected)
        return factors[: levels + 1]

    def learn(self, tree: PrefixTree, committed: Sequence[int]) -> None:
        """Compare a tree, with its own chances, with what the target wrote."""
        node = 0
        for level, true in enumerate(committed):
            children = tree.children(node)
            if not children:
                return
            self._grow(level + 1)
            promised = sum(tree.chances[child] for child in children.values())
            self._expected[level] *= _FORGET
            self._hits[level] *= _FORGET
            self._expected[level] += promised / max(tree.chances[node], 1e-9)
            if true not in children:
                return
            self._hits[level] += 1
            node = children[true]

    def forgive(self) -> None:
        """A step for which no tree was drafted."""
        for level, expected in enumerate(self._expected):
            lacking = expected - self._hits[level]
            self._hits[level] = expected - _FORGIVE * lacking

    def _grow(self, levels: int) -> None:
        missing = levels - len(self._hits)
        self._hits += [_PRIOR_WEIGHT] * missing
        self._expected += [_PRIOR_WEIGHT] * missing
