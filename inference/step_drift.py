"""By how much steps differ from what was measured: learnt from those that are taken.

A measurement was taken at another length of the text, perhaps while something else ran. The
logarithm of each size's seconds over those measured is a Gaussian process over sizes: all of them
shifted alike (a level), large ones more than small ones (a tilt), and each a little together with
its neighbours. A step of one size so corrects all of them, also those that are never taken; and
what is not confirmed is slowly forgotten. Only where that ends far from what was measured is it
believed: the costs of a quiet measurement choose better trees than those of a text's own steps.

Shapes: S sizes.
Source: Rasmussen and Williams 2006, "Gaussian processes for machine learning", equations 2.23 and
2.24, one observation at a time; forgetting makes a Kalman filter of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Standard deviations of logarithms.
_LEVEL = 1.0
_TILT = 0.5  # of the largest size against none
_LOCAL = 0.2
_NOISE = 0.12  # of one step
_NEAR = 1.0  # doublings of a tree, within which sizes are off together
_FORGOTTEN = 1e-3  # at every step
_AGREEING = 0.3  # with what was measured; from twice that on, all that was learnt is believed
_BELIEVABLE = 2.5  # standard deviations: a step that was interrupted says no more than this


class StepDrift:
    """Seconds of steps by size, as measured and as they have turned out since.

    Args:
        sizes: drafted nodes, ascending.
        measured: seconds of each.
    """

    def __init__(self, sizes: Sequence[int], measured: Sequence[float]) -> None:
        self._sizes = sizes
        self._measured_S = np.array(measured)
        self._logs = [math.log(seconds) for seconds in measured]
        self._places = [_place(size) for size in sizes]
        places_S = np.array(self._places)
        tilt_S = places_S / max(self._places[-1], 1.0)
        apart_SS = places_S[:, None] - places_S
        covariance_SS = (
            _LEVEL**2
            + _TILT**2 * tilt_S[:, None] * tilt_S
            + _LOCAL**2 * np.exp(-0.5 * (apart_SS / _NEAR) ** 2)
        )
        self._forgotten_SS = _FORGOTTEN * covariance_SS
        self._covariance_SS = covariance_SS
        self._drift_S = np.zeros(len(sizes))

    def learn(self, nodes: int, seconds: float) -> None:
        """A step with so many drafted nodes took so long."""
        below, share = self._between(nodes)
        drift_S, covariance_SS = self._drift_S, self._covariance_SS
        drift_S *= 1 - _FORGOTTEN
        covariance_SS *= 1 - _FORGOTTEN
        covariance_SS += self._forgotten_SS
        expected = self._logs[below] + float(drift_S[below])
        shared_S = covariance_SS[below].copy()
        variance = float(shared_S[below])
        if share:
            above = self._logs[below + 1] + float(drift_S[below + 1])
            expected += share * (above - expected)
            shared_S += share * (covariance_SS[below + 1] - shared_S)
            variance = (1 - share) * float(shared_S[below]) + share * float(shared_S[below + 1])
        variance += _NOISE**2
        bound = _BELIEVABLE * math.sqrt(variance)
        surprise = min(max(math.log(seconds) - expected, -bound), bound)
        gain_S = shared_S / variance
        drift_S += surprise * gain_S
        covariance_SS -= gain_S[:, None] * shared_S

    def seconds(self) -> NDArray[np.float64]:
        """Of a step of each size, [S]; never less for more nodes.

        What was measured stays where what was learnt nearly agrees: a measurement takes all sizes
        in turns, a text each where it suits.
        """
        apart_S = self._drift_S - np.median(self._drift_S)
        off = max(np.abs(self._drift_S).max(), np.abs(apart_S).max())
        believed = np.clip(off / _AGREEING - 1.0, 0.0, 1.0)
        seconds_S = self._measured_S * np.exp(believed * self._drift_S)
        return np.minimum.accumulate(seconds_S[::-1])[::-1]

    def doubt(self, size: int, other: int) -> float:
        """How far what is known of the ratio of two sizes, given by their indices, may be off: the
        standard deviation of its logarithm."""
        covariance_SS = self._covariance_SS
        apart = covariance_SS[size, size] + covariance_SS[other, other]
        return math.sqrt(max(float(apart - 2 * covariance_SS[size, other]), 0.0))

    def _between(self, nodes: int) -> tuple[int, float]:
        """The size below, and how far it is from there to the next one."""
        above = min(bisect_left(self._sizes, nodes), len(self._sizes) - 1)
        if above == 0 or self._sizes[above] <= nodes:
            return above, 0.0
        low, high = self._places[above - 1], self._places[above]
        return above - 1, (_place(nodes) - low) / (high - low)


def _place(nodes: int) -> float:
    """Where a size stands among others: a tree of twice the nodes, its root counted, is one on."""
    return math.log2(1 + nodes)
