"""How many nodes the next step verifies, where the host takes the steps of recorded forwards.

Shapes: N nodes of the largest tree.
"""

from __future__ import annotations

import time

from torch import Tensor

from medusa_heads.inference.adapt.buckets import Buckets


class Paced:
    """Chooses by Buckets where the host goes from step to step: each is timed from its drafts to
    the next one's, and counts if it is said to be `usual`.

    Attributes:
        usual: whether nothing was made in the last step, and nothing left out.
        expected_N: see Buckets.learn; of the last step's drafts.
    """

    usual = False
    expected_N: Tensor | None = None
    _last: Buckets | None = None  # which chose the last step's size
    _size, _began = 0, 0.0

    def next(self, buckets: Buckets, accepted: float) -> int:
        """Drafted nodes of a step that begins, by what was accepted in the last one."""
        now = time.perf_counter()
        if self.usual and self._last is not None and self.expected_N is not None:
            self._last.learn(self._size, accepted, self.expected_N.tolist(), now - self._began)
        self._last, self._size, self._began, self.usual = buckets, buckets.next(), now, False
        return self._size
