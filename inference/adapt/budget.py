"""How large a draft gains the most: expected tokens against the seconds they take.

A second is worth as many tokens as decoding yields in one. A node is verified where the chance that
it is accepted is above what its seconds are worth; a whole draft where its tokens are, against a
step without one. Plain decoding is one of the sizes, so that drafting never costs.

Source: renewal reward. The policy with the most tokens a second in the long run maximises, step by
step, tokens less the long run's rate times seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.machine.measurements import MOMENT

_KEPT = 1.0 - 1 / 48  # steps for which a second's worth is remembered
_LEAST = 0.008  # a chance below which no node is thought about


class Budget:
    """Chooses how many nodes are verified.

    Args:
        clock: seconds of a step.
        sizes: drafted nodes a row to choose from; 0 is plain decoding.
        rows: decoded together; may change.
        padded: trees have exactly these sizes, spare nodes included: each is a graph of its own
            where the target is compiled.

    Attributes:
        sizes, most: the numbers of drafted nodes to choose from, in order, and the last of them.
        columns: what is known of a second's worth, as `Lessons` keeps it.
    """

    def __init__(
        self, clock: Clock, sizes: Sequence[int], rows: int = 1, *, padded: bool = False
    ) -> None:
        self._clock, self.sizes = clock, sorted(set(sizes))
        self.rows, self.padded, self.most = rows, padded, self.sizes[-1]
        self.again = 0  # tokens read again in front of the trees
        # Tokens, steps and seconds; at first as of plain decoding.
        self.columns = [12.0], [12.0], [12.0 * clock.step(rows)]

    @property
    def worth(self) -> float:
        """Tokens a row that a second is worth; never less than plain decoding makes of it."""
        (tokens,), _, (seconds,) = self.columns
        return max(tokens / max(seconds, MOMENT), 1.0 / self._clock.step(self.rows))

    def learn(self, tokens: float, seconds: float) -> None:
        """A step gave a row so many tokens on average, and took so long, drafting included."""
        for column, new in zip(self.columns, (tokens, 1.0, seconds), strict=True):
            column[0] = _KEPT * column[0] + new

    def seconds(self, drafted: int) -> float:
        """Of a step that verifies so many drafted nodes a row, its drafting left out."""
        return self._clock.step(self.rows * (drafted + 1) + self.again)

    def least(self) -> float:
        """The chance below which no node pays, whatever its place."""
        if self.padded:
            return _LEAST
        fewest, *sizes = self.sizes
        seconds = self._clock.curve(self.rows, self.most, self.again)
        slopes = [(seconds[size] - seconds[fewest]) / (size - fewest) for size in sizes]
        flattest = min(slopes, default=0.0)
        return max(0.6 * self.worth * flattest, _LEAST) if flattest else 0.0

    def best(
        self, expected: Sequence[float] | Mapping[int, float], longest: int | None = None
    ) -> tuple[int, float]:
        """How many of the likeliest nodes to verify, and what such a step is worth in tokens.

        Args:
            expected: the tokens of a row that are expected to be accepted where 0, 1, 2, .. nodes
                are verified, on average over the rows; or those of the sizes alone.
            longest: the most nodes that are there.
        """
        worth = self.worth
        longest = len(expected) - 1 if longest is None else longest
        best, most = 0, -float("inf")
        for size in self.sizes:
            size = size if self.padded else min(size, longest)
            value = expected[min(size, longest)] - worth * self.seconds(size)
            if value > most:
                best, most = size, value
            if size >= longest:
                break
        return best, most

    def untried(self, size: int) -> int | None:
        """The next larger size, where no step told how long that takes: what was measured of it may
        be too much, and it would never be taken. None where there is none."""
        above = next((each for each in self.sizes if each > size), None)
        if above is None or self._clock.knows(self.rows * (above + 1) + self.again):
            return None
        return above

    def may_pay(self, beyond: int, value: float, bound: Callable[[int], float]) -> bool:
        """Whether more nodes than `beyond` may be worth more than this many tokens.

        Args:
            bound: more tokens of a row are not expected where so many nodes come besides.
        """
        worth, seconds = self.worth, self._clock.curve(self.rows, self.most, self.again)
        value -= 1e-9  # what the bound says is rounded
        for nodes in range(beyond + 1, self.most + 1):
            if bound(nodes - beyond) - worth * seconds[nodes] > value:
                return True
        return False

    def taken(self, gains: Sequence[float], seconds: Sequence[float]) -> int:
        """How many of the first of these to take, so that they gain the most.

        Args:
            gains: tokens a row that are expected of each.
            seconds: that taking 0, 1, 2, .. of them takes.
        """
        values = [0.0]
        for count, gain in enumerate(gains):
            paid = self.worth * (seconds[count + 1] - seconds[count])
            values.append(values[-1] + gain - paid)
        return max(range(len(values)), key=values.__getitem__)
