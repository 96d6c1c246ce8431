"""The interface of everything that drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from medusa_heads.inference.engine.state import DecodingState
    from medusa_heads.trees.tree import TokenTree


class Drafter(Protocol):
    """Proposes a token tree from the decoding state, and never touches the target's cache."""

    @property
    def num_nodes(self) -> int:
        """The most nodes that a proposed tree has, the root included."""

    reads_prompt: bool
    """Whether the first proposal needs the hidden states of the whole prompt."""

    def propose(self, state: DecodingState) -> TokenTree:
        """A tree for every active row; node 0 holds `state.roots_B`."""


@runtime_checkable
class Observer(Protocol):
    """A drafter that learns from what the target says of its trees."""

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """Called after every verification, with the target's logits of every node."""


@runtime_checkable
class Timed(Protocol):
    """A drafter that learns from how long its trees take to verify."""

    def learn_seconds(self, nodes: int, seconds: float) -> None:
        """Called after a step, with the drafted nodes of each row, spare ones included, and its
        seconds, its drafting left out."""
