"""Chains that are drafted token by token, for as long as the next one is expected to gain more than
its seconds are worth.

Shapes: B active rows, R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch

from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.growing import Proposal, Source, by_drawing
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.tree import TokenTree, TreeShape

_USUAL_LENGTH = 3  # tokens of a chain, before any was drafted
# The likeliest tokens [B, R] at one place of every row's chain, which goes on with the first, and
# their probabilities.
Level = tuple[list[list[int]], list[list[float]]]
Continuation = Callable[[DecodingState], Generator[Level, None, None]]


@dataclass(eq=False)
class ChainSource(Source):
    """A chain for every row, all of one length, with the next best tokens of each place beside it.
    What it reads and its facts are as Source says."""

    reads_on = True

    name: str
    continuation: Continuation  # drafts, place by place, for as long as it is asked
    clock: Clock  # what the target's steps take
    token: Callable[[int], float]  # seconds that a token of so many rows is expected to take
    most: int  # tokens of a chain
    agreement: float  # how often its tokens are expected to be right
    _: KW_ONLY
    apart: int = 1  # places whose tokens are believed for themselves; later ones as the last
    reads_prompt: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.evidence = by_drawing(lambda: Evidence([1.0] * (self.apart * LEVELS)))
        self._usual = Evidence([self.agreement])  # chances of tokens that were drafted
        self._budgets: dict[int, Budget] = {}  # by rows
        self.clock.learn_drafting(self.name, _USUAL_LENGTH * self.token(1))

    def draft(self, state: DecodingState) -> list[Proposal]:
        rows, evidence = len(state.rows), self.evidence[state.drawing]
        chains: list[list[list[tuple[int, float, int]]]] = [[] for _ in state.rows]
        chances, expected, seconds = [1.0] * rows, 1.0, 0.0
        budget = self._budgets.get(rows)
        if budget is None:
            sizes = range(self.most + 1)
            budget = self._budgets[rows] = Budget(self.clock, sizes, rows)
        with closing(self.continuation(state)) as continuation:
            started = time.perf_counter()
            for drafted, level_BR in enumerate(continuation, start=1):
                for b, (tokens, probs) in enumerate(zip(*level_BR, strict=True)):
                    groups = [self._group(drafted, prob) for prob in probs]
                    chains[b].append(list(zip(tokens, probs, groups, strict=True)))
                    likeliest = probs[0] if probs[0] >= 0.0 else 0.0  # which may be no number
                    chance = min(likeliest * evidence.rate(groups[0]), 1.0)
                    self._usual.learn(0, chance)
                    chances[b] *= chance
                reached = sum(chances) / rows
                expected += reached
                ended = time.perf_counter()
                token_seconds = self._token_seconds(rows, ended - started)
                seconds, started = seconds + token_seconds, ended
                longer = budget.seconds(drafted + 1) - budget.seconds(drafted) + token_seconds
                gain = reached * self._usual.rate(0)
                if drafted == self.most or gain < budget.worth * longer:
                    break
        budget.learn(expected, seconds + budget.seconds(drafted))
        return [Proposal(evidence, 0, partial(_behind, chain)) for chain in chains]

    def expected(self, nodes: int) -> float:
        return sum(self.agreement**depth for depth in range(1, min(nodes, self.most) + 1))

    def _group(self, place: int, prob: float) -> int:
        return LEVELS * (min(place, self.apart) - 1) + level(prob)

    def _token_seconds(self, rows: int, took: float) -> float:
        """Of a drafted token in each row, by what it has just taken and what it took before."""
        name = f"a token of {self.name} of {rows}"
        if not self.clock.drafting(name):
            self.clock.learn_drafting(name, self.token(rows))
        self.clock.learn_drafting(name, took)
        return self.clock.drafting(name)


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
