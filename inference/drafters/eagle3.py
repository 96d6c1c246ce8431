"""What an eagle3 layer has read of the texts as they grow.

Shapes: B active rows, P fresh positions (the most of any row), S slots, D hidden, X
columns of hidden states with features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medusa_heads.heads.eagle3 import Branches, Eagle3Heads
from medusa_heads.inference.drafters.base import Memory, unread
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.cache import RowCache


class Eagle3Text(Memory):
    """The layer's keys and values of the committed text, and behind them those of the drafts of one
    step, which the next step writes over.

    Row b's positions lie in slots [0, length_b), without padding: `lengths` count the target's
    hidden states that were read.
    """

    def __init__(self, heads: Eagle3Heads, rows: Sequence[Row]) -> None:
        super().__init__(rows)
        self.lengths = [0] * len(rows)
        self._heads = heads
        self._cache = RowCache(heads.decoder.midlayer.config)

    def advance(self, state: DecodingState) -> Branches:
        """Take in what was committed since last time; what follows it."""
        kept = self.follow(state.rows)
        if kept is not None:
            self._cache.select_batch(kept)
        hidden_BPX, following_BP, counts = unread(state)
        hidden_BPD = self._heads.fuse(hidden_BPX)
        device, fresh = hidden_BPD.device, hidden_BPD.shape[1]
        self._cache.set_length(max(self.lengths))
        lengths_B1 = torch.tensor(self.lengths, device=device)[:, None]
        positions_BP = lengths_B1 + torch.arange(fresh, device=device)
        self._heads.remember(hidden_BPD, following_BP, positions_BP, self._cache)
        self.lengths = self._cache.keep_paths([range(count) for count in counts], self.lengths)
        used = max(self.lengths)
        self._cache.set_length(used)
        # The last position of each row is read: it sees itself behind the text, not within it.
        last_B1 = torch.tensor(counts, device=device)[:, None] - 1
        ends_B1 = lengths_B1 + last_B1
        visible_BS = torch.arange(used + 1, device=device) < ends_B1
        visible_BS[:, -1] = True
        batch_B1 = torch.arange(len(counts), device=device)[:, None]
        out_B1D = self._heads.read(
            hidden_BPD[batch_B1, last_B1],
            following_BP[batch_B1, last_B1],
            ends_B1,
            visible_BS[:, None],
            self._cache,
        )
        return Branches(self._heads, self._cache, out_B1D[:, 0], ends_B1[:, 0], visible_BS)
