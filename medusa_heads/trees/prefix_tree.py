"""A token tree that grows on the host, likeliest node first.

Shapes: B batch, N tree nodes (root included).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from medusa_heads.trees.tree import TokenTree


class PrefixTree:
    """One row's draft: tokens, parents, depths and chances that a node is accepted, none above its
    parent's. Node 0 is the last committed token; its parent is -1.

    Nodes stand in the order in which they were added. Where each is added after its parent and
    with no larger a chance than those before it, the first n nodes are the subtree of n nodes with
    the most expected tokens.
    """

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depth, self.chances = [root], [-1], [0], [1.0]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, chance: float) -> int:
        """Add a child that `parent` does not have yet; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.chances.append(min(chance, self.chances[parent]))
        return len(self.tokens) - 1

    def accepted(self, committed: Sequence[int], drafted: int) -> int:
        """How many of these tokens the first `drafted` nodes besides the root had in store."""
        node = found = 0
        for child in range(1, min(drafted + 1, len(self)) if committed else 0):
            if self.parents[child] == node and self.tokens[child] == committed[found]:
                node, found = child, found + 1
                if found == len(committed):
                    break
        return found

    def expected(self, further: float = 1.0) -> list[float]:
        """How many tokens the first 0, 1, 2, .. nodes besides the root are expected to have
        accepted. No depth promises more than a certainty, though drafters that disagree may. Each
        token behind the first counts `further` as much as the one before it."""
        totals = [0.0] * (max(self.depth) + 1)
        sums, total = [0.0], 0.0
        for chance, depth in zip(self.chances[1:], self.depth[1:], strict=True):
            gain = min(chance, 1.0 - totals[depth])
            totals[depth] += gain
            total += gain * further ** (depth - 1)
            sums.append(total)
        return sums


def to_token_tree(
    trees: Sequence[PrefixTree],
    device: torch.device,
    drafted: int | None = None,
    at_least: int = 1,
) -> TokenTree:
    """The trees of a batch as tensors, all of one size.

    A row with fewer nodes repeats its last one: the walk finds the first of the two. A row without
    drafts repeats its root, which is nobody's child and so is never walked to. Of each tree only
    the first `drafted` nodes besides the root are taken; the result has `at_least` so many nodes.
    """
    longest = max(map(len, trees))
    if drafted is not None:
        longest = min(longest, drafted + 1)
    nodes = max(at_least, longest)
    numbers_3BN = np.empty((3, len(trees), nodes), dtype=np.int64)
    ancestors_BNN = np.zeros((len(trees), nodes, nodes), dtype=bool)
    for b, tree in enumerate(trees):
        own = min(len(tree), longest)
        for numbers_BN, values in zip(
            numbers_3BN, (tree.tokens, tree.parents, tree.depth), strict=True
        ):
            numbers_BN[b, :own] = values[:own]
            numbers_BN[b, own:] = values[own - 1]
        ancestors_NN = ancestors_BNN[b]
        for node, parent in enumerate(numbers_3BN[1, b].tolist()):
            if parent >= 0:
                ancestors_NN[node] = ancestors_NN[parent]
            ancestors_NN[node, node] = True
    tokens_BN, parents_BN, depth_BN = torch.from_numpy(numbers_3BN).to(device)
    return TokenTree(
        tokens_BN=tokens_BN,
        parents_BN=parents_BN,
        depth_BN=depth_BN,
        ancestors_BNN=torch.from_numpy(ancestors_BNN).to(device),
    )
