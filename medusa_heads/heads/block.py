"""Block heads: all at once from the whole text so far, each a query of one block.

Shapes: R rows (any leading dimensions), K heads, D hidden, E = K * D.
Source: the block drafters DFlash (arXiv:2602.06036) and DSpark (DeepSeek 2026, arXiv:2607.05147),
the latter with a correction by the token before.
"""

from __future__ import annotations

from torch import Tensor, nn

from medusa_heads.config import HeadsConfig
from medusa_heads.heads.base import DraftHeads
from medusa_heads.heads.prefix import PrefixLayer


class BlockHeads(DraftHeads):
    """K heads without weights but for `prefix.*`, `config.num_layers` layers that all share: what
    `encode` gives of a position holds the features of all."""

    kind = "block"

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        assert config.hidden_size is not None
        self.prefix = PrefixLayer(config.hidden_size, config.num_heads, config.num_layers)

    def _blocks(self, head: int) -> list[nn.Module]:
        return []

    def features(self, hidden_RE: Tensor, tokens_RK: Tensor | None = None) -> Tensor:
        """See DraftHeads: (..., E) -> (..., K, D)."""
        return hidden_RE.unflatten(-1, (self.config.num_heads, -1))
