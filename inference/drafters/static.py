"""What drafters of one fixed tree shape have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from medusa_heads.heads import DraftHeads
from medusa_heads.trees.tree import TokenTree, TreeShape

if TYPE_CHECKING:
    from medusa_heads.inference.engine.state import DecodingState

_Heads = TypeVar("_Heads", bound=DraftHeads)


class StaticDrafter(ABC, Generic[_Heads]):
    """Heads that fill a tree of one shape at every step.

    Args:
        heads: on their target's device.
        shape: the tree.
        temperatures: of the heads' probabilities.
        with_log_probs: give the nodes' draft probabilities too, for rules that compare with them.

    Raises:
        ValueError: the tree is deeper than there are heads, or wider than their vocabulary.
    """

    def __init__(
        self,
        heads: _Heads,
        shape: TreeShape,
        *,
        temperatures: Sequence[float] | None = None,
        with_log_probs: bool = False,
    ) -> None:
        _check_shape(heads, shape)
        self.shape = shape
        self._heads = heads
        self._temperatures = list(temperatures or [1.0] * heads.config.num_heads)
        self._with_log_probs = with_log_probs
        self.reads_prompt = heads.config.prefix_attention

    @property
    def num_nodes(self) -> int:
        """Nodes of every proposed tree, the root included."""
        return self.shape.num_nodes

    def propose(self, state: DecodingState) -> TokenTree:
        """The heads' candidates in the tree, for every active row."""
        return self._draft(state) if self.shape.choices else TokenTree.root_only(state.roots_B)

    @abstractmethod
    def _draft(self, state: DecodingState) -> TokenTree:
        """`propose` of a tree with at least one drafted node."""


def _check_shape(heads: DraftHeads, shape: TreeShape) -> None:
    """Raises ValueError where the tree is deeper or wider than the heads can draft."""
    if shape.max_depth > heads.config.num_heads:
        raise ValueError(
            f"the tree is {shape.max_depth} levels deep, but there are only "
            f"{heads.config.num_heads} heads: use a shallower tree"
        )
    if shape.max_rank >= heads.config.num_candidates:
        raise ValueError(
            f"the tree asks for rank {shape.max_rank} of {heads.config.num_candidates} tokens"
        )
