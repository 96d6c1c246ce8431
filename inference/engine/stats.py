"""What one call of generation did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class GenerationStats:
    """Counts and times of one generation, steps and tokens summed over its rows."""

    steps: int = 0  # forwards a row took part in, its prefill included
    forwards: int = 0  # of the target, whatever rows took part; a prefill in chunks counts as one
    tokens: int = 0  # committed
    # How often a step accepted 0, 1, 2, .. drafted tokens of a row.
    accepted: Counter[int] = field(default_factory=Counter)
    # Wall time by phase: prefill, draft, target, walk, cache, or `step` for the last four where
    # they are one graph; on a GPU the work queued in a phase
    # may be waited for in a later one.
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0  # wall time of the whole call
    lossless: bool = True  # whether the rule leaves the target's distribution unchanged

    @property
    def tokens_per_step(self) -> float:
        """Committed tokens per target forward; plain decoding is 1.0."""
        return self.tokens / self.steps if self.steps else 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's wall time to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
