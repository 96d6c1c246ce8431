"""Drafts of the target itself with some of its layers left out: its first ones alone, or a set that
was found to be dispensable.

The layers that run read and write the target's own cache: each drafted token's rows stand behind
the text, at one common slot of all active rows, for as long as drafting goes on. Then all of them
are dropped, and the verification writes its own.

Shapes: B active rows, P drafted tokens written so far, V vocabulary.
Source: Zhang et al. 2023, "Draft & Verify: lossless large language model acceleration via
self-speculative decoding", arXiv:2309.08168; Elhoushi et al. 2024, "LayerSkip", arXiv:2404.16710.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass
from functools import partial

import torch

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.measure import target_clock
from medusa_heads.inference.drafters.base import behind_texts
from medusa_heads.inference.drafters.chains import ChainSource, Level, OneToken
from medusa_heads.inference.drafters.coupling import best_drafts, coupling
from medusa_heads.inference.drafters.extra.layer_stack import LayerStack
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.target import TargetModel

_FIRST_LAYER = "early exit after one layer"


class ThinnedTarget:
    """The target without some of its layers; `layers` of them run."""

    def __init__(self, target: TargetModel, stack: LayerStack, skipped: Collection[int]) -> None:
        self._target, self._stack, self._skipped = target, stack, sorted(set(skipped))
        self.layers, self.facts = len(stack) - len(self._skipped), {"without": self._skipped}
        assert self.layers > 0

    def continuation(self, state: DecodingState) -> Generator[Level, None, None]:
        """The next token of every active row and its probability, then the one after it, and so on
        for as long as it is asked. Until it is closed, the state's cache is longer."""
        cache, past, device = state.cache, max(state.lengths), state.roots_B.device
        padding_B1 = torch.tensor(state.padding, device=device)[:, None]
        offsets_B1 = padding_B1 - torch.tensor(state.ahead, device=device)[:, None]
        ends_B1 = torch.tensor(state.lengths, device=device)[:, None] - offsets_B1
        positions_BP = ends_B1[:, :0]
        tokens_B, coupled = state.roots_B, coupling(state)
        try:
            while True:
                written = positions_BP.shape[1]
                position_B1 = self._target.within(ends_B1 + written)
                sees_B1P = ends_B1.new_ones(len(ends_B1), 1, written + 1, dtype=torch.bool)
                mask = behind_texts(
                    state.lengths, offsets_B1, sees_B1P, position_B1, positions_BP, padding_B1
                )
                cache.set_length(mask.first_on_host)  # also of the layers that are left out
                with self._stack.without(self._skipped):
                    logits_B1V = self._target.read(tokens_B[:, None], cache, mask)
                positions_BP = torch.cat([positions_BP, position_B1], dim=1)
                tokens_B1, probs_B1 = best_drafts(logits_B1V, 1, coupled, written)
                tokens_B = tokens_B1[:, 0]
                yield tokens_B1.tolist(), probs_B1.tolist()
        finally:
            cache.set_length(past)


@dataclass
class ExitClock:
    """What drafting with some of a target's layers takes."""

    steps: Clock  # of the target
    layers: int
    first: float  # seconds of a drafted token of one row with the first layer alone

    @classmethod
    def measured(cls, target: TargetModel, stack: LayerStack) -> ExitClock:
        """On this machine, or as it was measured before."""
        chain = OneToken(ThinnedTarget(target, stack, range(1, len(stack))).continuation)
        steps = target_clock(target, {_FIRST_LAYER: (chain, {"layers": 1})})
        return cls(steps, len(stack), steps.drafting(_FIRST_LAYER))

    def token(self, layers: int, rows: int = 1) -> float:
        """Seconds of a drafted token in each row. All layers take what a plain step takes."""
        plain = self.steps.step(1)
        first = min(self.first, plain)
        alone = first + (layers - 1) / (self.layers - 1) * (plain - first)
        return alone * self.steps.step(rows) / plain


class EarlyExitSource(ChainSource):
    """Chains of the thinned target.

    Args:
        thinned: drafts.
        clock: what its drafts and the target's steps take.
        most: tokens of a chain.
        agreement: how often the thinned target says what the whole one says.
    """

    def __init__(
        self, thinned: ThinnedTarget, clock: ExitClock, most: int, agreement: float = 0.6
    ) -> None:
        token = partial(clock.token, thinned.layers)
        drafts = thinned.continuation
        super().__init__(
            "early exit", drafts, clock.steps, token, most, agreement, facts=thinned.facts
        )
