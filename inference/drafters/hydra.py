"""Drafts from Hydra heads: head after head along the paths of a static tree.

Shapes: B batch, F paths that a head goes on from, J tokens of a path, D hidden, R ranks, N nodes.
Source: Ankner et al. 2024, "Hydra", arXiv:2402.05109, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.heads import HydraHeads
from medusa_heads.inference.drafters.prefix import encoded_hidden
from medusa_heads.inference.drafters.static import StaticDrafter
from medusa_heads.trees.guesses import best
from medusa_heads.trees.tree import TokenTree, TreeShape

if TYPE_CHECKING:
    from medusa_heads.inference.engine.state import DecodingState


@dataclass(frozen=True)
class _Level:
    """One depth of the tree: which paths go on, and where its nodes find their tokens.

    Attributes:
        going_on_F: of the nodes one level up (the root alone at first), those with children.
        picks_N: of this level's nodes, places in the flattened [F, R] candidates.
        num_ranks: R here.
        places_N: of this level's nodes, places in the tree.
    """

    going_on_F: Tensor
    picks_N: Tensor
    num_ranks: int
    places_N: Tensor


class HydraDrafter(StaticDrafter[HydraHeads]):
    """Sequential heads: node (r_0, .., r_d) takes the r_d-th best token that head d names after the
    tokens of its own path."""

    @cached_property
    def _levels(self) -> dict[torch.device, list[_Level]]:
        return {}

    def _draft(self, state: DecodingState) -> TokenTree:
        device, batch = state.roots_B.device, len(state.roots_B)
        if device not in self._levels:
            self._levels[device] = _levels(self.shape, device)
        hidden_BD = encoded_hidden(self._heads, state)
        tokens_BN = state.roots_B.new_empty(batch, self.num_nodes)
        tokens_BN[:, 0] = state.roots_B
        log_probs_BN = torch.zeros(batch, self.num_nodes, device=device)  # the root is certain
        paths_BFJ = state.roots_B[:, None, None]
        for depth, level in enumerate(self._levels[device]):
            paths_BFJ = paths_BFJ.index_select(1, level.going_on_F)
            logits_BFV = self._heads.after_paths(depth, hidden_BD, paths_BFJ)
            if self._with_log_probs:
                tokens_BFR, log_probs_BFR = best(
                    self._heads, logits_BFV, level.num_ranks, 1 / self._temperatures[depth]
                )
                drafted_log_probs_BN = log_probs_BFR.flatten(1).index_select(1, level.picks_N)
                log_probs_BN[:, level.places_N] = drafted_log_probs_BN
            else:
                tokens_BFR = self._heads.token_ids(logits_BFV.topk(level.num_ranks).indices)
            drafted_BN = tokens_BFR.flatten(1).index_select(1, level.picks_N)
            tokens_BN[:, level.places_N] = drafted_BN
            above_N = level.picks_N // level.num_ranks
            paths_BFJ = torch.cat(
                [paths_BFJ.index_select(1, above_N), drafted_BN[:, :, None]], dim=2
            )
        return self.shape.tree(tokens_BN, log_probs_BN if self._with_log_probs else None)


def _levels(shape: TreeShape, device: torch.device) -> list[_Level]:
    index = {path: place for place, path in enumerate(shape.choices, start=1)}
    levels = []
    above: list[tuple[int, ...]] = [()]
    for depth in range(1, shape.max_depth + 1):
        nodes = [path for path in shape.choices if len(path) == depth]
        parents = sorted({path[:-1] for path in nodes}, key=above.index)
        ranks = max(path[-1] for path in nodes) + 1
        levels.append(
            _Level(
                torch.tensor([above.index(path) for path in parents], device=device),
                torch.tensor(
                    [parents.index(path[:-1]) * ranks + path[-1] for path in nodes], device=device
                ),
                ranks,
                torch.tensor([index[path] for path in nodes], device=device),
            )
        )
        above = nodes
    return levels
