"""Drafters whose trees grow on the host, with the chance that each node is accepted.

Shapes: B active rows, N tree nodes (root included).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from medusa_heads.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from medusa_heads.inference.drafters.base import Drafter
    from medusa_heads.inference.state import DecodingState


class Grower(Protocol):
    """Grows a tree for every active row; how much of it is verified, others decide."""

    reads_prompt: bool
    """Whether the first trees need the hidden states of the whole prompt."""

    def grow(self, state: DecodingState) -> list[PrefixTree]:
        """A tree for every active row; its root holds the row's last token."""


class TensorTrees:
    """A drafter's tensors as trees on the host.

    Args:
        drafter: its trees carry draft probabilities, unless `chances` stand for them.
        chances: of a drafter whose trees always look alike: for each node but the root, the chance
            that it is accepted.
    """

    def __init__(self, drafter: Drafter, chances: list[float] | None = None) -> None:
        self.drafter = drafter
        self._chances = chances
        self.reads_prompt = drafter.reads_prompt

    def grow(self, state: DecodingState) -> list[PrefixTree]:
        """See Grower."""
        drafted = self.drafter.propose(state)
        tokens, parents = drafted.tokens_BN.tolist(), drafted.parents_BN.tolist()
        if self._chances is not None:
            chances = [[1.0, *self._chances]] * len(tokens)
        else:
            assert drafted.log_probs_BN is not None
            path_BN = (drafted.log_probs_BN[:, None] * drafted.ancestors_BNN).sum(-1)
            chances = path_BN.exp().tolist()
        trees = []
        for b, (root, *others) in enumerate(tokens):
            tree, place = PrefixTree(root), [0]
            for node, token in enumerate(others, 1):
                place.append(tree.add(place[parents[b][node]], token, chances[b][node]))
            trees.append(tree)
        return trees
