"""Drafts of the target itself with some of its layers left out: its first ones alone, or a set that
was found to be dispensable.

The layers that run read and write the target's own cache: each drafted token's rows stand behind
the text, at one common slot of all active rows, for as long as drafting goes on. Then all of them
are dropped, and the verification writes its own.

A chain ends where the next token would cost more than it may bring: what a draft's probability is
worth is learnt from what became of earlier drafts.

Shapes: B active rows, S cache slots, P drafted tokens written so far, V vocabulary.
Source: Zhang et al. 2023, "Draft & Verify: lossless large language model acceleration via
self-speculative decoding", arXiv:2309.08168; Elhoushi et al. 2024, "LayerSkip", arXiv:2404.16710.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from medusa_heads.attention import TreeMask
from medusa_heads.inference.layer_stack import LayerStack
from medusa_heads.prefix_tree import PrefixTree
from medusa_heads.target import TargetModel

if TYPE_CHECKING:
    from medusa_heads.inference.exit_costs import ExitCosts
    from medusa_heads.inference.state import DecodingState

_BOUNDS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # from these probabilities on, another level
_PRIOR = (0.12, 0.28, 0.42, 0.57, 0.72, 0.85, 0.93, 0.98)
_PRIOR_WEIGHT = 4.0
_FORGET = 0.995


class ThinnedTarget:
    """The target without some of its layers.

    Args:
        target: the target.
        stack: its layers.
        skipped: indices of those that are left out.
    """

    def __init__(self, target: TargetModel, stack: LayerStack, skipped: Collection[int]) -> None:
        assert len(set(skipped)) < len(stack)
        self._target = target
        self._stack = stack
        self._skipped = sorted(set(skipped))

    def continuation(
        self, state: DecodingState
    ) -> Generator[tuple[list[int], list[float]], None, None]:
        """The next token of every active row and its probability, then the one after it, and so on
        for as long as it is asked. Until it is closed, the state's cache is longer."""
        cache, device = state.cache, state.roots_B.device
        past, batch = max(state.lengths), len(state.rows)
        lengths_B1 = torch.tensor(state.lengths, device=device)[:, None]
        padding_B1 = torch.tensor(state.padding, device=device)[:, None]
        slots_S = torch.arange(past, device=device)
        visible_BS = (slots_S >= padding_B1) & (slots_S < lengths_B1)
        own_B1 = torch.ones(batch, 1, dtype=torch.bool, device=device)
        positions_BP = lengths_B1[:, :0]
        limit = self._target.max_positions
        tokens_B = state.roots_B
        try:
            while True:
                written = positions_BP.shape[1]
                visible_BS = torch.cat([visible_BS, own_B1], dim=1)
                position_B1 = lengths_B1 - padding_B1 + written
                if limit is not None:
                    position_B1 = position_B1.clamp_max(limit - 1)
                cache.set_length(past + written)  # also of the layers that are left out
                mask = TreeMask(
                    visible_BS[:, None],
                    position_B1,
                    past + written,
                    padding_B1[:, 0],
                    written_positions_BP=positions_BP,
                )
                with self._stack.without(self._skipped):
                    logits_B1V = self._target.read(tokens_B[:, None], cache, mask)
                positions_BP = torch.cat([positions_BP, position_B1], dim=1)
                probs_B, tokens_B = logits_B1V[:, 0].float().softmax(dim=-1).max(dim=-1)
                yield tokens_B.tolist(), probs_B.tolist()
        finally:
            cache.set_length(past)


class EarlyExitTrees:
    """A chain for every row, all of one length: a grower, so that other drafts merge in.

    Args:
        thinned: drafts.
        costs: of drafting and of verifying.
    """

    reads_prompt = False

    def __init__(self, thinned: ThinnedTarget, costs: ExitCosts) -> None:
        self._thinned = thinned
        self._costs = costs
        self._trust = ConfidenceTrust()

    def grow(self, state: DecodingState) -> list[PrefixTree]:
        """See Grower."""
        drafted: dict[int, tuple[int, list[int], list[float]]]
        drafted = state.memories.setdefault(self, {})
        for row in state.rows:
            if row.index in drafted:
                length, tokens, probs = drafted.pop(row.index)
                self._trust.learn(tokens, probs, row.behind(length))
        tokens_by_row: list[list[int]] = [[] for _ in state.rows]
        probs_by_row: list[list[float]] = [[] for _ in state.rows]
        with closing(self._thinned.continuation(state)) as continuation:
            for level_tokens, level_probs in continuation:
                for b, (token, prob) in enumerate(zip(level_tokens, level_probs, strict=True)):
                    tokens_by_row[b].append(token)
                    probs_by_row[b].append(prob)
                chances = [self._trust.chances(probs) for probs in probs_by_row]
                if not self._costs.worth_another(chances, self._trust.mean):
                    break
        trees = [PrefixTree(root) for root in state.roots_B.tolist()]
        for b, row in enumerate(state.rows):
            trees[b].add_path(tokens_by_row[b], chances[b])
            drafted[row.index] = (row.length, tokens_by_row[b], probs_by_row[b])
        return trees


class ConfidenceTrust:
    """How often a drafted token was right, by the probability that the draft gave it."""

    def __init__(self) -> None:
        self._hits = [_PRIOR_WEIGHT * chance for chance in _PRIOR]
        self._trials = [_PRIOR_WEIGHT] * len(_PRIOR)

    @property
    def mean(self) -> float:
        """How often drafts were right of late."""
        return sum(self._hits) / sum(self._trials)

    def chances(self, probs: Sequence[float]) -> list[float]:
        """The chance that the first 1, 2, .. tokens of a chain are all right."""
        chances, chance = [], 1.0
        for prob in probs:
            level = bisect_right(_BOUNDS, prob)
            chance *= self._hits[level] / self._trials[level]
            chances.append(chance)
        return chances

    def learn(
        self, tokens: Sequence[int], probs: Sequence[float], committed: Sequence[int]
    ) -> None:
        """Compare a chain with what the target wrote."""
        for token, prob, true in zip(tokens, probs, committed, strict=False):
            level = bisect_right(_BOUNDS, prob)
            self._trials[level] = _FORGET * self._trials[level] + 1
            self._hits[level] = _FORGET * self._hits[level] + (token == true)
            if token != true:
                return
