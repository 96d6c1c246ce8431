"""Another drafter for every number of active rows: as rows of a batch end, larger trees pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from medusa_heads.inference.drafters.base import Drafter, Observer, Timed

if TYPE_CHECKING:
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree


class ByRowsDrafter:
    """Hands on to the drafter for as many rows as are still being decoded.

    Args:
        drafter_for: gives the drafter for 1, 2, 4, .. rows. None may read the prompt: what such a
            drafter remembers of the text would be lost on the others.
        batch_size: rows at the beginning.
    """

    reads_prompt = False

    def __init__(self, drafter_for: Callable[[int], Drafter], batch_size: int) -> None:
        self._drafters: dict[int, Drafter] = {}
        rows = 1
        while rows < 2 * batch_size:
            self._drafters[rows] = drafter_for(rows)
            rows *= 2
        assert not any(drafter.reads_prompt for drafter in self._drafters.values())
        self._latest = self._drafters[rounded_up(batch_size)]

    @property
    def num_nodes(self) -> int:
        """The most nodes that a proposed tree has, the root included."""
        return max(drafter.num_nodes for drafter in self._drafters.values())

    def propose(self, state: DecodingState) -> TokenTree:
        """A tree for every active row."""
        self._latest = self._drafters[rounded_up(len(state.rows))]
        return self._latest.propose(state)

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """See Observer."""
        if isinstance(self._latest, Observer):
            self._latest.observe(tree, logits_BNV)

    def took(self, nodes: int, seconds: float) -> None:
        """See Timed."""
        if isinstance(self._latest, Timed):
            self._latest.took(nodes, seconds)


def rounded_up(rows: int) -> int:
    """The next of 1, 2, 4, ..: what is measured for it serves all numbers up to it."""
    return 1 << (rows - 1).bit_length()
