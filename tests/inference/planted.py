"""A drafter that plants the true continuation on random branches of a tree.

Random drafts are hardly ever accepted, so they would leave the cache's bookkeeping and the mask
untested. This drafter knows the reference continuation and puts its tokens on a randomly chosen
branch to a random depth; all other nodes hold random tokens, or what another drafter guessed.

Shapes: B active rows, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.engine.decoding import decode
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree, TreeShape

BUSHY = [
    *[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)],
    *[(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (2, 1, 0, 0)],
]


def decoding(target: TargetModel, drafter: Drafter, **known: Any) -> Callable[..., Any]:
    """What transformers' generate() takes as `custom_generate`: decoding with these drafts."""

    def decoded(_: Any, input_ids: torch.Tensor, synced_gpus: bool = False, **given: Any) -> Any:
        return decode(target, drafter, input_ids, **known, **given)

    return decoded


class Planting(Drafter):
    """Another drafter's trees, with the true continuation on one path of each.

    A path holds the truth down to a random depth: it goes a node further with probability `share`.
    All that branches off it is false, so that nothing else is accepted.

    Args:
        drafter: makes the trees; one that does not learn from them.
        references: the true continuation of every row.
        vocab_size: of the target.
        share: see above.
        seed: of the paths.
        in_step: all rows go equally deep, so that all commit as many tokens.
    """

    def __init__(
        self,
        drafter: Drafter,
        references: Sequence[Sequence[int]],
        vocab_size: int,
        share: float = 0.75,
        seed: int = 0,
        *,
        in_step: bool = False,
    ) -> None:
        self.drafter = drafter
        self.num_nodes, self.reads_prompt = drafter.num_nodes, drafter.reads_prompt
        self.references = references
        self.vocab_size = vocab_size
        self.share = share
        self.in_step = in_step
        self.random = torch.Generator().manual_seed(seed)

    def propose(self, state: DecodingState) -> TokenTree:
        tree = self.drafter.propose(state)
        tokens, depths, parents = torch.stack(
            [tree.tokens_BN, tree.depth_BN, tree.parents_BN]
        ).tolist()
        truths = [self.truth(row)[len(row.tokens) :] for row in state.rows]
        most = [min(max(depth), len(truth)) for depth, truth in zip(depths, truths, strict=True)]
        goals = [self._depth(min(most) if self.in_step else limit) for limit in most]
        if self.in_step:
            goals = goals[:1] * len(goals)
        for b, goal in enumerate(goals):
            self._plant(tokens[b], depths[b], parents[b], truths[b], goal)
        planted_BN = torch.tensor(tokens, device=tree.tokens_BN.device)
        return replace(tree, tokens_BN=planted_BN)

    def truth(self, row: Row) -> Sequence[int]:
        """The true continuation of its prompt."""
        return self.references[row.index]

    def _plant(
        self,
        tokens: list[int],
        depths: Sequence[int],
        parents: Sequence[int],
        truth: Sequence[int],
        goal: int,
    ) -> None:
        """The truth on a path as long as the goal; what branches off it is false."""
        ends = [node for node, depth in enumerate(depths) if depth == goal]
        node = ends[int(self._coin() * len(ends))] if goal else 0
        path = {0}
        while node:
            path.add(node)
            tokens[node] = truth[depths[node] - 1]
            node = parents[node]
        for node in range(1, len(tokens)):
            if parents[node] in path and node not in path and depths[node] <= len(truth):
                # A guess that happens to be right would be accepted.
                right = tokens[node] == truth[depths[node] - 1]
                tokens[node] = (tokens[node] + right) % self.vocab_size

    def _depth(self, most: int) -> int:
        depth = 0
        while depth < most and self._coin() < self.share:
            depth += 1
        return depth

    def _coin(self) -> float:
        return float(torch.rand((), generator=self.random))


class RandomTrees(Drafter):
    """Trees of one shape, full of random tokens."""

    def __init__(self, shape: TreeShape, vocab_size: int, seed: int) -> None:
        self.shape, self.vocab_size, self.num_nodes = shape, vocab_size, shape.num_nodes
        self.random = torch.Generator().manual_seed(seed)

    def propose(self, state: DecodingState) -> TokenTree:
        shape = (len(state.rows), self.num_nodes)
        tokens_BN = torch.randint(self.vocab_size, shape, generator=self.random)
        tokens_BN[:, 0] = state.roots_B.cpu()
        chances = [0.6 ** len(path) / 3 for path in self.shape.choices]
        log_probs_N = torch.tensor([1.0, *chances]).log()
        device = state.roots_B.device
        return self.shape.tree(tokens_BN.to(device), log_probs_N.expand(shape).to(device))


class PlantedDrafter(Planting):
    """Trees shaped by `choices`, the truth planted among random tokens."""

    def __init__(
        self,
        references: Sequence[Sequence[int]],
        vocab_size: int,
        choices: Sequence[Sequence[int]] = BUSHY,
        share: float = 0.75,
        seed: int = 0,
        *,
        in_step: bool = False,
    ) -> None:
        self.shape = TreeShape.from_choices(choices)
        trees = RandomTrees(self.shape, vocab_size, seed)
        super().__init__(trees, references, vocab_size, share, seed, in_step=in_step)


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
