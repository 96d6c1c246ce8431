"""Token trees: what a drafter proposes and one forward of the target verifies.

Shapes: B batch, N tree nodes, K heads, V vocabulary.

Node 0 is the last committed token; every other node's parent has a smaller index. Here is a tree of
seven nodes, drawn with the token of each node, and its ancestor mask (a row sees its own path):

    0:the --- 1:cat --- 3:sat --- 6:on          0 1 2 3 4 5 6
          |         `-- 4:ran                 0 x
          `-- 2:dog --- 5:sat                 1 x x
                                              2 x . x
                                              3 x x . x
                                              4 x x . . x
                                              5 x . x . . x
                                              6 x x . x . . x
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.config import RankPath

MOST_DRAFTED = 1024
"""Nodes besides the root: more pay on no machine."""


class Ranked(NamedTuple):
    """The nodes of a tree that was grown likeliest first, none of which comes before its parent."""

    scores_BN: Tensor  # log-probability of each node's path
    ranks_BN: Tensor  # which one it was; the root is 0


@dataclass(frozen=True)
class TokenTree:
    """N draft nodes for every row of a batch."""

    tokens_BN: Tensor  # token id of each node; node 0 is the last committed token
    parents_BN: Tensor  # index of each node's parent; -1 for node 0
    depth_BN: Tensor  # distance from node 0
    ancestors_BNN: Tensor  # True where the column is the row's node itself or one of its ancestors
    # The draft's log-probability of each node after its parent, where the drafter knows it; only
    # lossy acceptance rules ask for it.
    log_probs_BN: Tensor | None = None
    # Of nodes whose children were drawn rather than chosen: the distribution [B, V] they were drawn
    # from, one after the other and none twice, in the order of their indices.
    drawn_from: Mapping[int, Tensor] = field(default_factory=dict)
    ranked: Ranked | None = None  # where the tree was grown likeliest first

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return self.tokens_BN.shape[1]

    @staticmethod
    def root_only(tokens_B: Tensor) -> TokenTree:
        """A tree without drafts: verifying it is one step of plain decoding."""
        roots_B1 = tokens_B[:, None]
        certain_B1 = torch.zeros_like(roots_B1, dtype=torch.float)
        return _WITHOUT_DRAFTS.tree(roots_B1, certain_B1)

    def chain_lengths(self) -> list[int]:
        """How many of each row's first nodes follow each other, each the child of the one before
        it; the root is the first."""
        before_N = torch.arange(-1, self.num_nodes - 1, device=self.parents_BN.device)
        return (self.parents_BN == before_N).long().cumprod(dim=1).sum(dim=1).tolist()

    def leading_chains(self, most: Sequence[int] | None = None) -> TokenTree:
        """Of each row the first nodes, as far as they follow each other, and at most so many; what
        is left of shorter rows are spare nodes. Chains of one length are themselves."""
        lengths = self.chain_lengths()
        if most is not None:
            lengths = [min(each) for each in zip(lengths, most, strict=True)]
        nodes = max(lengths)
        drawn_from = {node: probs for node, probs in self.drawn_from.items() if node < nodes}
        chains = replace(
            self._with_nodes(lambda of_BN: of_BN[:, :nodes], self.ancestors_BNN[:, :nodes, :nodes]),
            drawn_from=drawn_from,
            ranked=None,
        )
        if min(lengths) == nodes:
            return self if nodes == self.num_nodes else chains
        lengths_B1 = torch.tensor(lengths, device=self.tokens_BN.device)[:, None]
        spare_BN = torch.arange(nodes, device=lengths_B1.device) >= lengths_B1
        itself_NN = torch.eye(nodes, dtype=torch.bool, device=lengths_B1.device)
        return chains._with_nodes(
            lambda of_BN: of_BN[:, :1].where(spare_BN, of_BN),
            itself_NN.where(spare_BN[..., None], chains.ancestors_BNN),
        )

    def with_spare(self, num_nodes: int) -> TokenTree:
        """As a tree of so many nodes: behind its own the root stands again and again, which is
        nobody's child, and so is verified and never walked to."""
        spare = num_nodes - self.num_nodes
        if spare <= 0:
            return self
        ancestors_BNN = F.pad(self.ancestors_BNN, (0, spare, 0, spare))
        own_N = torch.arange(self.num_nodes, num_nodes, device=ancestors_BNN.device)
        ancestors_BNN[:, own_N, own_N] = True
        return self._with_nodes(
            lambda of_BN: torch.cat([of_BN, of_BN[:, :1].expand(-1, spare)], dim=1), ancestors_BNN
        )

    def _with_nodes(self, made: Callable[[Tensor], Tensor], ancestors_BNN: Tensor) -> TokenTree:
        """As a tree of other nodes, of which `made` gives what is known of each."""
        known = self.log_probs_BN
        return replace(
            self,
            tokens_BN=made(self.tokens_BN),
            parents_BN=made(self.parents_BN),
            depth_BN=made(self.depth_BN),
            ancestors_BNN=ancestors_BNN,
            log_probs_BN=None if known is None else made(known),
        )


class TreeShape:
    """The topology of a static tree, named by paths of ranks as FasterDecoding's medusa_choices:
    (0,) is the first head's best token, (0, 2) that followed by the second head's third best.

    Attributes:
        choices: the path of each node but the root, in node order.
        parents: index of each node's parent; -1 for node 0.
        depth: length of each node's path.
        num_nodes: N, the root included.
        max_depth: of all nodes.
    """

    def __init__(self, choices: Sequence[RankPath]) -> None:
        self.choices = list(choices)
        index = {(): 0} | {path: i for i, path in enumerate(self.choices, start=1)}
        self.parents = [-1] + [index[path[:-1]] for path in self.choices]
        self.depth = [0] + [len(path) for path in self.choices]
        self.num_nodes, self.max_depth = len(self.parents), max(self.depth)
        self._on: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def from_choices(cls, choices: Sequence[Sequence[int]]) -> TreeShape:
        """Order the paths so that the chain of best ranks comes first, parents before children.

        The likeliest path then lies in consecutive nodes, whose cache rows need not move. Raises
        ValueError: a path without its parent, twice, empty, or with a negative rank."""
        paths = [tuple(int(rank) for rank in path) for path in choices]
        known = set(paths)
        if len(known) < len(paths):
            raise ValueError("tree choices name the same path twice: every path once")
        for path in paths:
            if not path or min(path) < 0:
                raise ValueError(
                    f"a tree choice is a non-empty list of ranks of at least 0, got {list(path)}"
                )
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(
                    f"tree choice {list(path)} has no parent {list(path[:-1])}: add it"
                )
        return cls(sorted(paths, key=lambda path: (any(path), len(path), path)))

    def chain(self) -> TreeShape:
        """Of this tree only the path of best ranks."""
        return TreeShape([path for path in self.choices if not any(path)])

    @cached_property
    def max_rank(self) -> int:
        """The largest rank any node asks of its head; -1 for a tree without drafts."""
        return max((max(path) for path in self.choices), default=-1)

    @cached_property
    def ancestors_NN(self) -> Tensor:
        """True where the column is the row's node or one of its ancestors."""
        ancestors_NN = np.eye(self.num_nodes, dtype=bool)  # a torch operation a node takes longer
        for node, parent in enumerate(self.parents[1:], start=1):
            ancestors_NN[node] |= ancestors_NN[parent]
        return torch.from_numpy(ancestors_NN)

    def tree(self, tokens_BN: Tensor, log_probs_BN: Tensor | None = None) -> TokenTree:
        """This shape filled with tokens, the same topology in every row."""
        device, batch = tokens_BN.device, tokens_BN.shape[0]
        if device not in self._on:
            self._on[device] = (
                torch.tensor(self.parents, device=device),
                torch.tensor(self.depth, device=device),
                self.ancestors_NN.to(device),
            )
        parents_N, depth_N, ancestors_NN = self._on[device]
        return TokenTree(
            tokens_BN,
            parents_N.expand(batch, -1),
            depth_N.expand(batch, -1),
            ancestors_NN.expand(batch, -1, -1),
            log_probs_BN,
        )


_WITHOUT_DRAFTS = TreeShape([])


@cache
def chain_shape(num_nodes: int) -> TreeShape:
    """A chain of so many nodes, the root included."""
    return TreeShape([(0,) * depth for depth in range(1, num_nodes)])


def check_size(ranks_per_level: Iterable[int], asked: object) -> None:
    """Refuse what would take all memory before it is made: so many nodes behind each one of the
    level before, as was asked for. Raises ValueError: they are more than `MOST_DRAFTED`."""
    level, drafted = 1, 0
    for ranks in ranks_per_level:
        level *= ranks
        drafted += level
        if drafted > MOST_DRAFTED:
            raise ValueError(f"a tree has at most {MOST_DRAFTED} drafted nodes, got {asked!r}")


def cartesian_choices(ranks_per_head: Sequence[int]) -> list[RankPath]:
    """Every combination of the first `ranks_per_head[i]` candidates of each head i.

    Source: Medusa (arXiv:2401.10774), section 2.1.2. Raises ValueError: a count below one."""
    if any(count < 1 for count in ranks_per_head):
        raise ValueError(f"every head needs at least 1 candidate, got {list(ranks_per_head)}")
    choices: list[RankPath] = []
    level: list[RankPath] = [()]
    for count in ranks_per_head:
        level = [(*path, rank) for path in level for rank in range(count)]
        choices += level
    return choices
