"""Chains that are drafted token by token, for as long as the next one is expected to gain more than
its seconds are worth.

Shapes: B active rows, R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch

from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.growing import Proposal, Source, by_drawn
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.tree import TokenTree, TreeShape

_USUAL_LENGTH = 3  # tokens of a chain, before any was drafted
# The likeliest tokens [B, R] at one place of every row's chain, which goes on with the first, and
# their probabilities.
Level = tuple[list[list[int]], list[list[float]]]
Continuation = Callable[[DecodingState], Generator[Level, None, None]]


class ChainSource(Source):
    """A chain for every row, all of one length, with the next best tokens of each place beside it.

    Args:
        name: of what drafts.
        continuation: drafts, place by place, for as long as it is asked.
        clock: what the target's steps take.
        token: seconds that a drafted token of so many rows is expected to take.
        most: tokens of a chain.
        agreement: how often its tokens are expected to be right.
        apart: places whose tokens are believed for themselves; later ones as the last of these.
        reads_prompt, facts: see Source.
    """

    reads_on = True

    def __init__(
        self,
        name: str,
        continuation: Continuation,
        clock: Clock,
        token: Callable[[int], float],
        most: int,
        agreement: float,
        *,
        apart: int = 1,
        reads_prompt: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.reads_prompt, self.facts = name, reads_prompt, facts or {}
        self._continuation, self._clock, self._token = continuation, clock, token
        self._most, self._agreement, self._apart = most, agreement, apart
        self.evidence = by_drawn(lambda: Evidence([1.0] * (apart * LEVELS)))
        self._usual = Evidence([agreement])  # chances of tokens that were drafted
        self._budgets: dict[int, Budget] = {}  # by rows
        clock.learn_drafting(name, _USUAL_LENGTH * token(1))

    def draft(self, state: DecodingState) -> list[Proposal]:
        rows, evidence = len(state.rows), self.evidence[state.warpers is not None]
        chains: list[list[list[tuple[int, float, int]]]] = [[] for _ in state.rows]
        chances, expected, seconds = [1.0] * rows, 1.0, 0.0
        budget = self._budgets.get(rows)
        if budget is None:
            sizes = range(self._most + 1)
            budget = self._budgets[rows] = Budget(self._clock, sizes, rows)
        with closing(self._continuation(state)) as continuation:
            started = time.perf_counter()
            for drafted, level_BR in enumerate(continuation, start=1):
                for b, (tokens, probs) in enumerate(zip(*level_BR, strict=True)):
                    groups = [self._group(drafted, prob) for prob in probs]
                    chains[b].append(list(zip(tokens, probs, groups, strict=True)))
                    chance = min(probs[0] * evidence.rate(groups[0]), 1.0)
                    self._usual.learn(0, chance)
                    chances[b] *= chance
                reached = sum(chances) / rows
                expected += reached
                ended = time.perf_counter()
                token_seconds = self._token_seconds(rows, ended - started)
                seconds, started = seconds + token_seconds, ended
                longer = budget.seconds(drafted + 1) - budget.seconds(drafted) + token_seconds
                gain = reached * self._usual.rate(0)
                if drafted == self._most or gain < budget.worth * longer:
                    break
        budget.learn(expected, seconds + budget.seconds(drafted))
        return [Proposal(evidence, 0, partial(_behind, chain)) for chain in chains]

    def expected(self, nodes: int) -> float:
        return sum(self._agreement**depth for depth in range(1, min(nodes, self._most) + 1))

    def _group(self, place: int, prob: float) -> int:
        return LEVELS * (min(place, self._apart) - 1) + level(prob)

    def _token_seconds(self, rows: int, took: float) -> float:
        """Of a drafted token in each row, by what it has just taken and what it took before."""
        name = f"a token of {self.name} of {rows}"
        if not self._clock.drafting(name):
            self._clock.learn_drafting(name, self._token(rows))
        self._clock.learn_drafting(name, took)
        return self._clock.drafting(name)


def _behind(
    chain: Sequence[Sequence[tuple[int, float, int]]], place: int | None
) -> list[tuple[int, float, int, Any]]:
    """The tokens behind a place of the chain. Places count its tokens; behind any other token there
    is nothing."""
    if place is None or place >= len(chain):
        return []
    return [
        (token, prob, group, None if rank else place + 1)
        for rank, (token, prob, group) in enumerate(chain[place])
    ]


class OneToken(Drafter):
    """The first token of a continuation, for measuring."""

    num_nodes = 2

    def __init__(self, continuation: Continuation) -> None:
        self._continuation, self._shape = continuation, TreeShape([(0,)])

    def propose(self, state: DecodingState) -> TokenTree:
        with closing(self._continuation(state)) as continuation:
            tokens_BR, _ = next(continuation)
        first_B1 = torch.tensor(tokens_BR, device=state.roots_B.device)[:, :1]
        return self._shape.tree(torch.cat([state.roots_B[:, None], first_B1], dim=1))
