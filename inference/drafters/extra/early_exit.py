"""Drafts of the target itself with some of its layers left out: its first ones alone, or a set that
was found to be dispensable.

The layers that run read and write the target's own cache: each drafted token's rows stand behind
the text, at one common slot of all active rows, for as long as drafting goes on. Then all of them
are dropped, and the verification writes its own.

A chain ends where the next token is expected to gain less than its seconds are worth.

Shapes: B active rows, S cache slots, P drafted tokens written so far, V vocabulary.
Source: Zhang et al. 2023, "Draft & Verify: lossless large language model acceleration via
self-speculative decoding", arXiv:2309.08168; Elhoushi et al. 2024, "LayerSkip", arXiv:2404.16710.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch

from medusa_heads.inference.adapt.budget import Budget
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level
from medusa_heads.inference.adapt.measure import target_clock
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.extra.layer_stack import LayerStack
from medusa_heads.inference.drafters.growing import Proposal, Source
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.attention import TreeMask
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree, TreeShape

_FIRST_LAYER = "early exit after one layer"
_USUAL_LENGTH = 3  # tokens of a chain, before any was drafted


class ThinnedTarget:
    """The target without some of its layers; `layers` of them run."""

    def __init__(self, target: TargetModel, stack: LayerStack, skipped: Collection[int]) -> None:
        self._target, self._stack, self._skipped = target, stack, sorted(set(skipped))
        self.layers = len(stack) - len(self._skipped)
        assert self.layers > 0

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


class ExitClock:
    """What drafting with some of a target's layers takes, by its steps and the seconds of a
    drafted token of one row with its first layer alone."""

    def __init__(self, steps: Clock, layers: int, first: float) -> None:
        self.steps = steps
        self._layers, self._first = layers, first

    @classmethod
    def measured(cls, target: TargetModel, stack: LayerStack) -> ExitClock:
        """On this machine, or as it was measured before."""
        chain = _OneToken(ThinnedTarget(target, stack, range(1, len(stack))))
        steps = target_clock(target, {_FIRST_LAYER: (chain, {"layers": 1})})
        return cls(steps, len(stack), steps.drafting(_FIRST_LAYER))

    def token(self, layers: int, rows: int = 1) -> float:
        """Seconds of a drafted token in each row. All layers take what a plain step takes."""
        plain = self.steps.step(1)
        first = min(self._first, plain)
        alone = first + (layers - 1) / (self._layers - 1) * (plain - first)
        return alone * self.steps.step(rows) / plain


class EarlyExitSource(Source):
    """A chain for every row, all of one length.

    Args:
        thinned: drafts.
        clock: what its drafts and the target's steps take.
        most: tokens of a chain.
        agreement: how often the thinned target says what the whole one says.
    """

    name = "early exit"
    reads_on = True

    def __init__(
        self, thinned: ThinnedTarget, clock: ExitClock, most: int, agreement: float = 0.6
    ) -> None:
        self._thinned, self._clock, self._most = thinned, clock, most
        self._agreement = agreement
        self._evidence = Evidence([1.0] * LEVELS)
        self._usual = Evidence([agreement])  # chances of tokens that were drafted
        self._budgets: dict[int, Budget] = {}  # by rows
        clock.steps.learn_drafting(self.name, _USUAL_LENGTH * clock.token(thinned.layers))

    def draft(self, state: DecodingState) -> list[Proposal]:
        rows = len(state.rows)
        chains: list[list[tuple[int, float]]] = [[] for _ in state.rows]
        chances, expected, seconds = [1.0] * rows, 1.0, 0.0
        budget = self._budgets.get(rows)
        if budget is None:
            sizes = range(self._most + 1)
            budget = self._budgets[rows] = Budget(self._clock.steps, sizes, rows)
        with closing(self._thinned.continuation(state)) as continuation:
            started = time.perf_counter()
            for drafted, level_B in enumerate(continuation, start=1):
                for b, (token, prob) in enumerate(zip(*level_B, strict=True)):
                    chains[b].append((token, prob))
                    chance = min(prob * self._evidence.rate(level(prob)), 1.0)
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
        return [Proposal(self._evidence, 0, partial(_behind, chain)) for chain in chains]

    def expected(self, nodes: int) -> float:
        return sum(self._agreement**depth for depth in range(1, min(nodes, self._most) + 1))

    def _token_seconds(self, rows: int, took: float) -> float:
        """Of a drafted token in each row, by what it has just taken and what it took before."""
        steps, name = self._clock.steps, f"a token of {self.name} of {rows}"
        if not steps.drafting(name):
            steps.learn_drafting(name, self._clock.token(self._thinned.layers, rows))
        steps.learn_drafting(name, took)
        return steps.drafting(name)


def _behind(chain: Sequence[tuple[int, float]], place: int) -> list[tuple[int, float, int, Any]]:
    """One token behind another. Places count them."""
    return [(token, prob, level(prob), place + 1) for token, prob in chain[place : place + 1]]


class _OneToken(Drafter):
    """A draft of one token, for measuring."""

    num_nodes = 2

    def __init__(self, thinned: ThinnedTarget) -> None:
        self._thinned, self._shape = thinned, TreeShape([(0,)])

    def propose(self, state: DecodingState) -> TokenTree:
        with closing(self._thinned.continuation(state)) as continuation:
            tokens, _ = next(continuation)
        drafted_B1 = torch.tensor(tokens, device=state.roots_B.device)[:, None]
        return self._shape.tree(torch.cat([state.roots_B[:, None], drafted_B1], dim=1))
