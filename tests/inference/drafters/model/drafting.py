"""Draft models at seconds that are the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from medusa_heads import DraftedModel, TargetModel
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters.extra.chosen_draft import ChosenDraftDrafter
from medusa_heads.inference.engine.noise import Rng
from medusa_heads.inference.plan.draft import draft_plan


class Costs(NamedTuple):
    """Seconds, where so many rows are decoded together: of steps that verify 0, 1, 2, .. drafted
    tokens of each, of a forward of the draft model, and of each further token in that."""

    verifying: Sequence[float]
    forward: float
    beside: float = 0.0
    rows: int = 1

    @property
    def most(self) -> int:
        """Drafted tokens."""
        return len(self.verifying) - 1

    @property
    def target(self) -> Clock:
        """Of the target; what a step really takes changes nothing."""
        steps = enumerate(self.verifying, start=1)
        return Clock({self.rows * tokens: seconds for tokens, seconds in steps}, learns=False)

    @property
    def draft(self) -> Clock:
        """Of the draft model."""
        seconds = {1: self.forward}
        if self.beside:
            seconds[101] = self.forward + 100 * self.beside
        return Clock(seconds, learns=False)

    def seconds(self, drafted: int, forwards: int) -> float:
        """Of a step."""
        return self.verifying[drafted] + forwards * self.forward


def line(slope: float, most: int = 8) -> list[float]:
    """Plain decoding takes a second."""
    return [1.0 + slope * drafted for drafted in range(most + 1)]


CHEAP = Costs(line(0.01), forward=0.02)
FLAT = Costs(line(0.001, 39), forward=0.02)
DEAR = Costs(line(0.3), forward=0.3)


def drafted(
    target: Any,
    drafts: Sequence[Any],
    costs: Sequence[Costs],
    tree: str = "auto",
    kind: type[ChosenDraftDrafter] = ChosenDraftDrafter,
    *,
    chain_only: bool = False,
    rng: Rng = "transformers",
) -> DraftedModel:
    """A target with these draft models, which draw their drafts unless `rng` is keyed."""
    model = DraftedModel(target, drafts[0], tree="chain", rng=rng)
    plan = draft_plan(tree, 3, chain_only=chain_only, one_size=False)
    vocab_size = target.config.vocab_size
    drafters = [
        (plan.drafter(TargetModel(draft), vocab_size, clock), clock)
        for draft, clock in zip(drafts, [cost.draft for cost in costs], strict=True)
    ]
    model.drafter = kind(costs[0].target, drafters, costs[0].most if plan.adaptive else 0)
    return model


def steps(model: DraftedModel) -> list[int]:
    """That each draft model has drafted for."""
    assert isinstance(model.drafter, ChosenDraftDrafter)
    return model.drafter.steps
