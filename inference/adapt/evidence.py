"""How often drafted tokens were accepted: one counter, by source and confidence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

# Confidences are told apart by these bounds: probabilities that a drafter gives its tokens.
_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
LEVELS = len(_BOUNDS) + 1


def level(confidence: float) -> int:
    """Which of the `LEVELS` groups a confidence belongs to."""
    return bisect_right(_BOUNDS, confidence)


def levels(confidences: np.ndarray) -> np.ndarray:
    """The same of many."""
    return np.searchsorted(_BOUNDS, confidences, side="right")


class Evidence:
    """What came of drafts, group by group, over what was expected of them.

    Each group begins with a prior, and old drafts are forgotten exponentially.

    Args:
        priors: what is accepted over what is expected, by group.
        weight: expected tokens for which a prior counts.
        memory: drafts after which one counts a third of a new one.

    Attributes:
        columns: what is known, as `Lessons` keeps it.
    """

    def __init__(
        self, priors: Sequence[float], *, weight: float = 4.0, memory: float = 200.0
    ) -> None:
        self._accepted = [weight * prior for prior in priors]
        self._expected = [weight] * len(priors)
        self.columns = self._accepted, self._expected
        self._kept = 1.0 - 1.0 / memory

    def rate(self, group: int) -> float:
        """Accepted tokens over expected ones."""
        return self._accepted[group] / self._expected[group]

    def learn(self, group: int, accepted: float, expected: float = 1.0) -> None:
        """Count a draft: the tokens accepted of it, and those that were expected."""
        self.learn_all([(group, accepted, expected)])

    def learn_all(self, drafts: Iterable[tuple[int, float, float]]) -> None:
        """Count them in this order: of each its group, and what `learn` takes."""
        known_accepted, known_expected, kept = self._accepted, self._expected, self._kept
        for group, accepted, expected in drafts:
            known_accepted[group] = kept * known_accepted[group] + accepted
            known_expected[group] = kept * known_expected[group] + expected
