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

    Args:
        root: the last committed token.
        further: what each token behind the first counts of the one before it, in `nearer`.

    Attributes:
        expected: how many tokens the first 0, 1, 2, .. nodes besides the root are expected to have
            accepted. No depth promises more than a certainty, though drafters that disagree may.
        nearer: the same, where what is further counts less.
    """

    def __init__(self, root: int, further: float = 1.0) -> None:
        self.tokens, self.parents, self.depth, self.chances = [root], [-1], [0], [1.0]
        self.expected, self.nearer = [0.0], [0.0]
        self._further = further
        # By depth: what all nodes there promise, and what they count in `nearer`.
        self._reached, self._weights = [1.0, 0.0], [0.0, 1.0]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, chance: float) -> int:
        """Add a child that `parent` does not have yet; returns its index."""
        depth, above = self.depth[parent] + 1, self.chances[parent]
        if chance > above:
            chance = above
        reached, weights = self._reached, self._weights
        if depth == len(reached):
            reached.append(0.0)
            weights.append(weights[-1] * self._further)
        # A comparison is quicker than `min`, and this is done for every node of every step.
        gain = 1.0 - reached[depth]
        if chance < gain:
            gain = chance
        reached[depth] += gain
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depth.append(depth)
        self.chances.append(chance)
        self.expected.append(self.expected[-1] + gain)
        self.nearer.append(self.nearer[-1] + gain * weights[depth])
        return node

    def accepted(self, committed: Sequence[int], drafted: int) -> int:
        """How many of these tokens the first `drafted` nodes besides the root had in store."""
        node = found = 0
        for child in range(1, min(drafted + 1, len(self)) if committed else 0):
            if self.parents[child] == node and self.tokens[child] == committed[found]:
                node, found = child, found + 1
                if found == len(committed):
                    break
        return found


def to_token_tree(
    trees: Sequence[PrefixTree], device: torch.device, drafted: int | None = None, at_least: int = 1
) -> TokenTree:
    """The trees of a batch as tensors, all of one size. A row with fewer nodes repeats its last
    one: the walk finds the first of the two. A row without drafts repeats its root, which is
    nobody's child and so is never walked to. Of each tree only the first `drafted` nodes besides
    the root are taken; the result has `at_least` so many nodes."""
    longest = max(map(len, trees))
    if drafted is not None:
        longest = min(longest, drafted + 1)
    nodes = max(at_least, longest)
    numbers: tuple[list[list[int]], ...] = ([], [], [])
    words: list[bytes] = []  # of every node its ancestors, a bit each
    width = (nodes + 7) // 8
    for tree in trees:
        own = min(len(tree), longest)
        spare = nodes - own
        for rows, values in zip(numbers, (tree.tokens, tree.parents, tree.depth), strict=True):
            rows.append(values[:own] + values[own - 1 : own] * spare)
        seen: list[int] = []
        for node, parent in enumerate(numbers[1][-1]):
            seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
        words += [each.to_bytes(width, "little") for each in seen]
    bits_BNX = np.frombuffer(b"".join(words), dtype=np.uint8).reshape(len(trees), nodes, width)
    ancestors_BNN = np.unpackbits(bits_BNX, axis=2, count=nodes, bitorder="little").view(bool)
    tokens_BN, parents_BN, depth_BN = torch.tensor(numbers, device=device)
    return TokenTree(
        tokens_BN=tokens_BN,
        parents_BN=parents_BN,
        depth_BN=depth_BN,
        ancestors_BNN=torch.from_numpy(ancestors_BNN).to(device),
    )
