"""Trees that heads draft: of one shape at every step, or shaped anew by their probabilities.

Shapes: B batch, K heads, N tree nodes, R ranks, F paths that a head goes on from, J tokens of a
path, D hidden, C candidates.
Sources: Medusa (Cai et al. 2024, arXiv:2401.10774, sections 2.1.2 and 2.3.3), Hydra (Ankner et al.
2024, arXiv:2402.05109, section 3), and the dynamic draft tree of EAGLE-2 (Li et al. 2024,
arXiv:2406.16858, section 3).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_heads.config import RankPath
from medusa_heads.heads import DraftHeads
from medusa_heads.heads.correction import LIKELY
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.coupling import as_drawn
from medusa_heads.inference.drafters.prefix import encoded_hidden, following
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.dynamic_tree import (
    DYNAMIC_RANKS,
    DYNAMIC_WIDTH,
    Guess,
    Ranking,
    best_first_tree,
    guesses,
    same_guesses,
)
from medusa_heads.trees.kernels import best
from medusa_heads.trees.on_host import best_first_on_host
from medusa_heads.trees.tree import TokenTree, TreeShape


class HeadsDrafter(Drafter):
    """Heads of any kind, on their target's device, and the temperatures of their probabilities.

    Attributes:
        depth: levels that they guess at.
    """

    def __init__(self, heads: DraftHeads, temperatures: Sequence[float] | None) -> None:
        self._heads: Any = heads
        self.depth = heads.config.num_heads
        self._ranking = Ranking(heads, temperatures or [1.0] * self.depth)
        self.reads_prompt = heads.config.reads_text
        self.levels = self.depth


class DynamicDrafter(HeadsDrafter):
    """A tree of `num_drafted` nodes besides the root, the likeliest ones at every step. Raises
    ValueError: no node, or more than the heads' candidates can form."""

    def __init__(
        self, heads: DraftHeads, num_drafted: int, *, temperatures: Sequence[float] | None = None
    ) -> None:
        super().__init__(heads, temperatures)
        self._num_ranks = min(DYNAMIC_RANKS, heads.config.num_candidates)
        self._width = DYNAMIC_WIDTH if heads.sequential else None
        most, level = 0, 1
        for _ in range(self.depth):
            level = min(level, self._width or level) * self._num_ranks
            most += level
        if not 1 <= num_drafted <= most:
            raise ValueError(f"a dynamic tree here has 1 to {most} nodes, got {num_drafted}")
        self.num_nodes = num_drafted + 1

    def propose(self, state: DecodingState) -> TokenTree:
        return self._grown(state, best_first_on_host if state.on_host else best_first_tree)

    def prepare(self, state: DecodingState) -> None:
        self._grown(state, best_first_tree)  # room for all that a graph may ask

    def _grown(self, state: DecodingState, grow: Callable[..., TokenTree]) -> TokenTree:
        limits = self.num_nodes - 1, self.depth, self._width
        return grow(state.roots_B, self.guess(state), *limits)

    def guess(self, state: DecodingState) -> Guess:
        """What the heads take to follow, in this step."""
        ranking = as_drawn(self._ranking, state)
        if self._heads.sequential:
            return guesses(ranking, following(self._heads, state), self._num_ranks)
        return same_guesses(ranking, encoded_hidden(self._heads, state), self._num_ranks)


class StaticDrafter(HeadsDrafter):
    """Heads that fill a tree of one shape at every step. Raises ValueError: the tree is deeper than
    there are heads, or wider than their vocabulary.

    Args:
        heads: on their target's device.
        temperatures: of the heads' probabilities.
        with_log_probs: give the nodes' draft probabilities too, for rules that compare with them.
    """

    def __init__(
        self,
        heads: DraftHeads,
        shape: TreeShape,
        *,
        temperatures: Sequence[float] | None = None,
        with_log_probs: bool = False,
    ) -> None:
        super().__init__(heads, temperatures)
        if shape.max_depth > self.depth:
            raise ValueError(
                f"the tree is {shape.max_depth} levels deep, but there are only "
                f"{self.depth} heads: use a shallower tree"
            )
        most = heads.config.num_candidates
        if heads.correction is not None:
            most = min(most, LIKELY)
        if shape.max_rank >= most:
            raise ValueError(f"the tree asks for rank {shape.max_rank} of {most} tokens")
        self.shape, self.num_nodes = shape, shape.num_nodes
        self.levels = shape.max_depth
        self._with_log_probs = with_log_probs
        self._places: tuple[torch.device, Any] | None = None

    def propose(self, state: DecodingState) -> TokenTree:
        if not self.shape.choices:
            return TokenTree.root_only(state.roots_B)
        device = state.roots_B.device
        if self._places is None or self._places[0] != device:
            self._places = (device, self._find(device))
        return self._draft(state, self._places[1])

    @abstractmethod
    def _find(self, device: torch.device) -> Any:
        """Where nodes find their tokens among the candidates."""

    @abstractmethod
    def _draft(self, state: DecodingState, places: Any) -> TokenTree:
        """The tree of this step; places are those that were found."""


class MedusaDrafter(StaticDrafter):
    """Heads that do not see each other: node (r_0, .., r_d) takes head d's r_d-th best token."""

    def _find(self, device: torch.device) -> Tensor:
        """Of each drafted node, in the flattened [K, R] table of candidates."""
        ranks = self.shape.max_rank + 1
        picks = [(len(path) - 1) * ranks + path[-1] for path in self.shape.choices]
        return torch.tensor(picks, device=device)

    def _draft(self, state: DecodingState, places: Tensor) -> TokenTree:
        roots_B, hidden_BD = state.roots_B, encoded_hidden(self._heads, state)
        ranks, log_probs_BN = self.shape.max_rank + 1, None
        if self._with_log_probs or state.noise is not None:
            ranking = as_drawn(self._ranking, state)
            tokens_BKR, log_probs_BKR = ranking.best(self._heads(hidden_BD), ranks)
            log_probs_BN = log_probs_BKR.flatten(1).index_select(1, places)
            log_probs_BN = torch.cat([log_probs_BN.new_zeros(len(roots_B), 1), log_probs_BN], dim=1)
        else:
            tokens_BKR = self._heads.token_ids(best(self._heads(hidden_BD), ranks)[1])
        drafted_BN = tokens_BKR.flatten(1).index_select(1, places)
        return self.shape.tree(torch.cat([roots_B[:, None], drafted_BN], dim=1), log_probs_BN)


class _Level(NamedTuple):
    """One depth of the tree: where its nodes find their tokens, and which of them go on."""

    num_ranks: int  # R here
    picks_N: Tensor  # of this level's nodes, places in the flattened [F, R] candidates
    # The same of those with children alone: the paths that the next level is asked for.
    picks_F: Tensor
    above_F: Tensor  # of these, which of this level's paths they stand behind


class _Levels(NamedTuple):
    """All of them, and of each node its place where these stand behind one another."""

    levels: list[_Level]
    places_N: Tensor


class SequentialDrafter(StaticDrafter):
    """Sequential heads: node (r_0, .., r_d) takes the r_d-th best token that head d names after the
    tokens of its own path."""

    def _find(self, device: torch.device) -> _Levels:
        levels: list[_Level] = []
        asked: list[RankPath] = [()]
        choices, inner = self.shape.choices, {path[:-1] for path in self.shape.choices}
        for depth in range(1, self.shape.max_depth + 1):
            nodes = [path for path in choices if len(path) == depth]
            ranks = max(path[-1] for path in nodes) + 1
            picks = {path: asked.index(path[:-1]) * ranks + path[-1] for path in nodes}
            asked = [path for path in nodes if path in inner]
            going_on = [picks[path] for path in asked]
            found = [*picks.values()], going_on, [pick // ranks for pick in going_on]
            tensors = (torch.tensor(each, dtype=torch.long, device=device) for each in found)
            levels.append(_Level(ranks, *tensors))
        by_depth = sorted(range(self.num_nodes), key=self.shape.depth.__getitem__)
        places_N = torch.tensor(by_depth, device=device).argsort()
        return _Levels(levels, places_N)

    def _draft(self, state: DecodingState, places: _Levels) -> TokenTree:
        roots_B, after = state.roots_B, following(self._heads, state)
        ranking = as_drawn(self._ranking, state)
        with_log_probs = self._with_log_probs or state.noise is not None
        tokens = [roots_B[:, None]]
        log_probs = [torch.zeros_like(tokens[0], dtype=torch.float)]  # the root is certain
        paths_BFJ, above_BF = roots_B[:, None, None], torch.zeros_like(tokens[0])
        for depth, level in enumerate(places.levels):
            logits_BFC, places_BC = after(depth, paths_BFJ, above_BF)
            if with_log_probs:
                tokens_BFR, log_probs_BFR = ranking.best(
                    logits_BFC, level.num_ranks, depth, places_BC
                )
                log_probs.append(log_probs_BFR.flatten(1).index_select(1, level.picks_N))
            else:
                _, ids_BFR = best(logits_BFC, level.num_ranks)
                tokens_BFR = ranking.tokens(ids_BFR, places_BC)
            offered_BC = tokens_BFR.flatten(1)
            tokens.append(offered_BC.index_select(1, level.picks_N))
            if depth + 1 < len(places.levels):
                above_BF = level.above_F.expand(len(roots_B), -1)
                own_BF = offered_BC.index_select(1, level.picks_F)
                before_BFJ = paths_BFJ.index_select(1, level.above_F)
                paths_BFJ = torch.cat([before_BFJ, own_BF[:, :, None]], dim=2)
        tokens_BN = torch.cat(tokens, dim=1).index_select(1, places.places_N)
        if not self._with_log_probs:
            return self.shape.tree(tokens_BN)
        log_probs_BN = torch.cat(log_probs, dim=1).index_select(1, places.places_N)
        return self.shape.tree(tokens_BN, log_probs_BN)
