"""A token tree that grows on the host, path by path: drafts of several kinds merged into one.

Shapes: B batch, N tree nodes (root included).

What begins alike is stored once. Two drafters that agree on a token so share a node, and the walk
that follows it can go on in either's continuation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from medusa_heads.tree import TokenTree


class PrefixTree:
    """One row's draft. Node 0 is the last committed token.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent, smaller than its own; -1 for node 0.
        depth: distance from node 0.
        chances: estimated probability that the node is accepted; never above its parent's.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depth = [0]
        self.chances = [1.0]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, chance: float) -> int:
        """The child of `parent` with this token, made if there was none; where two drafters propose
        it, the more confident one is believed."""
        chance = min(chance, self.chances[parent])
        node = self._children[parent].get(token)
        if node is None:
            node = self._children[parent][token] = len(self.tokens)
            self._children.append({})
            self.tokens.append(token)
            self.parents.append(parent)
            self.depth.append(self.depth[parent] + 1)
            self.chances.append(chance)
        else:
            self.chances[node] = max(self.chances[node], chance)
        return node

    def children(self, node: int) -> Mapping[int, int]:
        """A node's children by their tokens."""
        return self._children[node]

    def add_path(self, tokens: Iterable[int], chances: Iterable[float]) -> None:
        """A draft that begins at the root: its tokens, and the chance that all up to each are
        accepted."""
        node = 0
        for token, chance in zip(tokens, chances, strict=True):
            node = self.add(node, token, chance)

    def merge(self, other: PrefixTree) -> None:
        """Add another tree of the same root."""
        assert other.tokens[0] == self.tokens[0]
        place = [0]
        for node in range(1, len(other)):
            above = place[other.parents[node]]
            place.append(self.add(above, other.tokens[node], other.chances[node]))

    def by_depth(self, nodes: Iterable[int]) -> list[float]:
        """The chances of these nodes added up at depth 1, 2, ..; no depth promises more than a
        certainty, though drafters that disagree may."""
        totals = [0.0] * max(self.depth)
        for node in nodes:
            totals[self.depth[node] - 1] += self.chances[node]
        return [min(total, 1.0) for total in totals]

    def best_first(self) -> list[int]:
        """The nodes but the root, likeliest first, each after its parent: any beginning of the list
        is the subtree of that size with the most expected tokens."""
        # A node made earlier comes first among equals, and parents are made before children.
        return sorted(range(1, len(self)), key=lambda node: (-self.chances[node], node))

    def only(self, nodes: Iterable[int]) -> PrefixTree:
        """The tree of the root and these nodes, each of which follows its parent."""
        kept = PrefixTree(self.tokens[0])
        place = {0: 0}
        for node in nodes:
            above = place[self.parents[node]]
            place[node] = kept.add(above, self.tokens[node], self.chances[node])
        return kept


def to_token_tree(
    trees: Sequence[PrefixTree], device: torch.device, at_least: int = 1
) -> TokenTree:
    """The trees of a batch as tensors, all of one size, which has `at_least` so many nodes.

    A row with fewer nodes repeats its last one: the walk finds the first of the two. A row without
    drafts repeats its root, which is nobody's child and so is never walked to.
    """
    most = max(at_least, *map(len, trees))
    tokens_BN, parents_BN, depth_BN = [], [], []
    ancestors_BNN = np.zeros((len(trees), most, most), dtype=bool)
    for b, tree in enumerate(trees):
        ancestors_NN = ancestors_BNN[b]
        missing = most - len(tree)
        parents = tree.parents + [tree.parents[-1]] * missing
        tokens_BN.append(tree.tokens + [tree.tokens[-1]] * missing)
        parents_BN.append(parents)
        depth_BN.append(tree.depth + [tree.depth[-1]] * missing)
        for node, parent in enumerate(parents):
            if parent >= 0:
                ancestors_NN[node] = ancestors_NN[parent]
            ancestors_NN[node, node] = True
    return TokenTree(
        tokens_BN=torch.tensor(tokens_BN, device=device),
        parents_BN=torch.tensor(parents_BN, device=device),
        depth_BN=torch.tensor(depth_BN, device=device),
        ancestors_BNN=torch.from_numpy(ancestors_BNN).to(device),
    )
