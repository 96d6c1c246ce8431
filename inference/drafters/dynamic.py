"""Drafts from heads of any kind, in a tree rebuilt at every step from their probabilities.

Source: the dynamic draft tree of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from medusa_heads.heads import DraftHeads
from medusa_heads.inference.drafters.prefix import encoded_hidden
from medusa_heads.trees.dynamic_tree import DYNAMIC_RANKS, DYNAMIC_WIDTH, best_first_tree
from medusa_heads.trees.guesses import guesses
from medusa_heads.trees.tree import TokenTree

if TYPE_CHECKING:
    from medusa_heads.inference.engine.state import DecodingState


class DynamicDrafter:
    """A tree of fixed size, shaped anew at every step by the heads' calibrated probabilities.

    Args:
        heads: the heads, on their target's device.
        num_drafted: nodes besides the root.
        temperatures: of the heads' probabilities, fitted on held-out text.

    Raises:
        ValueError: no node, or more than the heads' candidates can form.
    """

    def __init__(
        self,
        heads: DraftHeads,
        num_drafted: int,
        *,
        temperatures: Sequence[float] | None = None,
    ) -> None:
        ranks = min(DYNAMIC_RANKS, heads.config.num_candidates)
        width = DYNAMIC_WIDTH if heads.sequential else None
        most, level = 0, 1
        for _ in range(heads.config.num_heads):
            level = min(level, width or level) * ranks
            most += level
        if not 1 <= num_drafted <= most:
            raise ValueError(f"a dynamic tree here has 1 to {most} nodes, got {num_drafted}")
        self._heads = heads
        self.reads_prompt = heads.config.prefix_attention
        self._num_drafted = num_drafted
        self._num_ranks = ranks
        self._width = width
        self._temperatures = list(temperatures or [1.0] * heads.config.num_heads)

    @property
    def num_nodes(self) -> int:
        """Nodes of every proposed tree, the root included."""
        return self._num_drafted + 1

    def propose(self, state: DecodingState) -> TokenTree:
        """The likeliest nodes, for every active row."""
        hidden_BD = encoded_hidden(self._heads, state)
        guess = guesses(self._heads, hidden_BD, self._num_ranks, self._temperatures)
        depth = self._heads.config.num_heads
        return best_first_tree(state.roots_B, guess, self._num_drafted, depth, self._width)
