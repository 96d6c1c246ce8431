"""A drafter that plants the true continuation on random branches of a random tree.

Random drafts are hardly ever accepted, so they would leave the cache's bookkeeping and the mask
untested. This drafter knows the reference continuation and puts its tokens on randomly chosen
branches to a random depth; all other nodes hold random tokens.

Shapes: B active rows, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.tree import TokenTree, TreeShape

BUSHY = [
    *[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)],
    *[(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (2, 1, 0, 0)],
]


class PlantedDrafter:
    """Trees shaped by `choices`; a level carries the reference with probability `share`."""

    reads_prompt = False

    def __init__(
        self,
        references: Sequence[Sequence[int]],
        vocab_size: int,
        choices: Sequence[Sequence[int]] = BUSHY,
        share: float = 0.75,
        seed: int = 0,
    ) -> None:
        self.references = references
        self.vocab_size = vocab_size
        self.shape = TreeShape.from_choices(choices)
        self.share = share
        self.random = torch.Generator().manual_seed(seed)

    @property
    def num_nodes(self) -> int:
        return self.shape.num_nodes

    def propose(self, state: DecodingState) -> TokenTree:
        batch, nodes = len(state.rows), self.shape.num_nodes
        tokens = torch.randint(self.vocab_size, (batch, nodes), generator=self.random)
        for b, row in enumerate(state.rows):
            tokens[b, 0] = row.tokens[-1]
            node, position = 0, len(row.tokens)
            reference = self.references[row.index]
            while position < len(reference) and self._coin() < self.share:
                children = [c for c, p in enumerate(self.shape.parents) if p == node]
                if not children:
                    break
                node = children[int(self._coin() * len(children))]
                tokens[b, node] = reference[position]
                position += 1
        return self.shape.tree(tokens.to(state.roots_B.device))

    def _coin(self) -> float:
        return float(torch.rand((), generator=self.random))


class PlainCausalDrafter(PlantedDrafter):
    """Negative control: the same trees, with a plain causal mask instead of the ancestor mask."""

    def propose(self, state: DecodingState) -> TokenTree:
        tree = super().propose(state)
        causal_NN = torch.ones(tree.num_nodes, tree.num_nodes, dtype=torch.bool).tril()
        return replace(
            tree, ancestors_BNN=causal_NN.to(tree.tokens_BN.device).expand_as(tree.ancestors_BNN)
        )


class Misremembering(BlendedDrafter):
    """Negative control: what the text suggests, every node seeing those behind it as well."""

    def propose(self, state: DecodingState) -> TokenTree:
        tree = super().propose(state)
        tree.ancestors_BNN[:] = torch.ones_like(tree.ancestors_BNN).triu()
        return tree
