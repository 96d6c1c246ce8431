"""What a step takes here, by rows, nodes and length of the text: measured, then corrected.

What a forward takes depends on how many tokens it reads, whichever rows they belong to. Seconds are
measured for some numbers of tokens of one row before anything is decoded. Every step that is taken
corrects them: all sizes alike for texts of about its length, and its own size beyond that.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from functools import cache

_LEVEL = 1 / 24  # the share of what is known of all sizes that a new step makes up
_OWN_PRIOR = 2.0  # steps for which a measured size counts
_OWN_KEPT = 0.96
_KNOWN = 4.0  # steps of a size, from which on it is known
_SURPRISE = 0.6  # in logarithms: an interrupted step says no more than this
_ALL_OF, _ONE_IN = 64, 3  # steps that are learnt from: all of the first ones, then one in so many
USUAL_AGAIN, _LONGEST_AGAIN = 12, 64  # tokens read again
_USUAL_DRAFT, _KEPT_OF_DRAFT = 5, 2  # tokens of a step, the root included, and those it commits
_DRAFTING = 1 / 16  # the share of a source's seconds that a new draft makes up


class Clock:
    """Seconds of the parts of a step. Raises ValueError: no size, or a time that is not above 0.

    Args:
        measured: seconds of a step that verifies so many tokens, the root among them.
        drafting: seconds that each source takes to draft, by its name.
        learns: whether the steps that are taken correct what was measured.

    Attributes:
        sizes: the numbers of tokens that were measured, in order.
    """

    def __init__(
        self,
        measured: Mapping[int, float],
        drafting: Mapping[str, float] | None = None,
        *,
        learns: bool = True,
    ) -> None:
        if not measured or min(measured) < 1 or min(measured.values()) <= 0:
            raise ValueError(f"a clock needs sizes of at least 1 and times above 0: {measured}")
        self.sizes = sorted(measured)
        self._seconds = [measured[tokens] for tokens in self.sizes]
        self._drafting = dict(drafting or {})
        self._learns = learns
        # How far what was measured is off, as logarithms: all sizes alike, by the text's length in
        # octaves, and each beyond that: its weight and mean.
        self._levels, self._octave = {0: 0.0}, 0
        self._own: dict[int, tuple[float, float]] = {}
        self._known: dict[int, float] = {}
        self._curves: dict[tuple[int, int, int], list[float]] = {}
        self._steps = 0

    @classmethod
    def flat(cls) -> Clock:
        """As if steps of all sizes took the same time: as many nodes pay as there are."""
        return cls({1: 1.0}, learns=False)

    def step(self, tokens: int) -> float:
        """Seconds of a step that verifies so many tokens in all rows, its drafting left out."""
        known = self._known.get(tokens)
        if known is None:
            weight, mean = self._own.get(_size(tokens), (0.0, 0.0))
            off = self._levels[self._octave] + mean * weight / (weight + _OWN_PRIOR)
            known = self._known[tokens] = self._measured(tokens) * math.exp(off)
        return known

    def knows(self, tokens: int) -> bool:
        """Whether steps of about so many tokens were taken."""
        weight, _ = self._own.get(_size(tokens), (0.0, 0.0))
        return not self._learns or weight >= _KNOWN

    def curve(self, rows: int, most: int, again: int = 0) -> list[float]:
        """Seconds of steps that verify 0, 1, 2, .. up to `most` nodes behind each root."""
        key = rows, most, again
        known = self._curves.get(key)
        if known is None:
            last = rows * (most + 1) + again
            known = self._curves[key] = [*map(self.step, range(rows + again, last + 1, rows))]
        return known

    def learn(self, tokens: int, seconds: float, context: int = 0) -> None:
        """A step that verified so many tokens behind a text of `context` took so long."""
        self._steps += 1
        if not self._learns or (self._steps > _ALL_OF and self._steps % _ONE_IN):
            return
        octave = max(context, 256).bit_length()
        if octave != self._octave:  # of the first such text, the last length's level is true
            self._levels.setdefault(octave, self._levels[self._octave])
            self._octave = octave
            self._forget()
        # What is known of this size, and how far the step was off, as far as that is believed.
        expected = math.log(self.step(tokens))
        surprise = min(max(math.log(seconds) - expected, -_SURPRISE), _SURPRISE)
        off = expected + surprise - math.log(self._measured(tokens))
        level = self._levels[octave]
        level += max(_LEVEL, 1 / (self._steps + 3)) * (off - level)
        self._levels[octave] = level
        weight, mean = self._own.get(_size(tokens), (0.0, 0.0))
        weight *= _OWN_KEPT
        mean += (off - level - mean) / (weight + 1.0)
        self._own[_size(tokens)] = (weight + 1.0, min(max(mean, -2.0), 2.0))
        self._forget()

    def drafting(self, source: str) -> float:
        """Seconds that this source takes to draft."""
        return self._drafting.get(source, 0.0)

    def learn_drafting(self, source: str, seconds: float, usual: float = math.inf) -> None:
        """This source has just taken so long to draft; where nothing is known of it, so long would
        be usual."""
        known = self._drafting.get(source)
        # Something else may have had the processor, or the first draft prepared all later ones.
        believable = min(seconds, 3 * (usual if known is None else known))
        if known is None:
            self._drafting[source] = believable
        elif self._learns:
            self._drafting[source] = known + _DRAFTING * (believable - known)

    def _forget(self) -> None:
        self._known.clear()
        self._curves.clear()

    def _measured(self, tokens: int) -> float:
        """Between sizes and beyond the last one on a straight line."""
        if len(self.sizes) == 1:
            return self._seconds[0]
        above = min(max(bisect_left(self.sizes, tokens), 1), len(self.sizes) - 1)
        low, high = self.sizes[above - 1], self.sizes[above]
        slope = (self._seconds[above] - self._seconds[above - 1]) / (high - low)
        if tokens > high:  # what was measured last may have been disturbed: more is never free
            slope = max(slope, 0.5 * self._seconds[above] / high)
        return self._seconds[above] + (tokens - high) * slope


def most_again(clock: Clock, rows: int = 1) -> int:
    """How many tokens of each of so many rows a target with a recurrent state best reads again in
    front of drafts, before it reads them in a step without any, which then commits a single token.

    The tokens a second of steps that all have a draft refused, from one step without drafts to the
    next, decide: the longer they are put off, the more is read again; the sooner they come, the
    more often nothing is drafted. Where the clock tells no sizes apart, a number that usually pays.
    """
    if len(clock.sizes) == 1:
        return USUAL_AGAIN
    most, fastest, seconds = 0, 0.0, 0.0
    for again in range(_KEPT_OF_DRAFT, _LONGEST_AGAIN + 1, _KEPT_OF_DRAFT):
        seconds += clock.step(rows * (again - _KEPT_OF_DRAFT + _USUAL_DRAFT))
        speed = (again + 1) / (seconds + clock.step(rows * (again + 1)))
        if speed > fastest:
            most, fastest = again - 1, speed
    return most


@cache
def _size(tokens: int) -> int:
    """The group of sizes that are off together: small ones are told apart, large ones less."""
    return tokens if tokens <= 4 else round(4 * math.log2(tokens))
