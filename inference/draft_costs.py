"""What drafting with a draft model costs here, measured once and kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from medusa_heads.inference.adapt.measure import (
    DEFAULT_CONTEXT,
    RandomChain,
    room,
    step_seconds,
)
from medusa_heads.inference.capability import capability
from medusa_heads.inference.drafters.adaptive_tree import AdaptiveTreeDrafter
from medusa_heads.inference.drafters.draft_trust import DraftTrust
from medusa_heads.target import TargetModel

if TYPE_CHECKING:
    from medusa_heads.inference.drafters.base import Drafter
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree

_VERIFIED = (1, 2, 4, 8, 15, 23, 31, 47, 63)  # with the root, matrix units take 16 at a time
_DEPTH, _WIDTH = 6, 4  # levels, and nodes of a level, of the drafts that are timed
_DEEPEST = 16


@dataclass(frozen=True)
class DraftCosts:
    """Seconds of the parts of a step.

    Attributes:
        verification: verifying 0, 1, 2, .. drafted tokens; never less for more of them.
        first: drafting the first token, with all that was committed before the last step read.
        further: each further forward of the draft model.
        reading: each token of the text that is still to be read besides.
        beside: each node behind the first that a forward reads.
    """

    verification: Sequence[float]
    first: float
    further: float
    reading: float = 0.0
    beside: float = 0.0

    @property
    def most(self) -> int:
        """The most tokens to draft."""
        return len(self.verification) - 1

    @property
    def deepest(self) -> int:
        """The most tokens to draft in a row."""
        return min(self.most, _DEEPEST)

    def seconds(self, verified: int, forwards: int, beside: int = 0) -> float:
        """Of a step with so many drafted tokens and forwards of the draft model, and nodes that
        were read beside the first of each; of more tokens than were measured, as if each cost what
        the last ones did."""
        drafting = self.first + (forwards - 1) * self.further if forwards else 0.0
        drafting += beside * self.beside
        beyond = verified - self.most
        if beyond <= 0 or not self.most:
            return self.verification[min(verified, self.most)] + drafting
        slope = (self.verification[-1] - self.verification[0]) / self.most
        return self.verification[-1] + beyond * slope + drafting


def draft_costs(target: TargetModel, draft: TargetModel, batch_size: int = 1) -> DraftCosts:
    """Measured costs of both models, on this machine.

    Raises:
        ValueError: the target's context leaves no room to measure.
    """
    fits = min(room(target), room(draft))
    sizes = [n for n in (0, *_VERIFIED) if n < room(target)]
    depth = max(min(_DEPTH, fits - 1), 1)
    chain_only = "chain" in (capability(target), capability(draft))
    width = 1 if chain_only or fits <= _WIDTH * depth else min(_WIDTH, target.vocab_size)
    drafters: dict[str, Drafter] = {f"verify:{n}": RandomChain(n, target.vocab_size) for n in sizes}
    for levels, nodes in ((1, 1), (depth, 1), (depth, width)):
        drafters[f"draft:{levels}x{nodes}"] = _SteadyTree(draft, target.vocab_size, levels, nodes)
    drafters["reading"] = _FromTheBeginning(draft, target.vocab_size, 1, 1)
    model = draft.config.to_dict() | {"_name_or_path": None}
    kind = {"kind": "draft model", "draft": model, "dtype": str(draft.dtype)}
    context = min(DEFAULT_CONTEXT, room(target))
    measured = step_seconds(target, drafters, kind, context, batch_size)
    # Fewer tokens never cost more. Where a measurement says so, something else ran meanwhile: the
    # lower one is right.
    verifying = [measured[f"verify:{n}"].step for n in sizes]
    believed = list(accumulate(reversed(verifying), min))[::-1]
    between = np.interp(range(sizes[-1] + 1), sizes, believed)
    first, deep = measured["draft:1x1"].drafting, measured[f"draft:{depth}x1"].drafting
    further = max(deep - first, 0.0) / (depth - 1) if depth > 1 else first
    wide = measured[f"draft:{depth}x{width}"].drafting
    read_beside = (depth - 1) * (width - 1)
    beside = max(wide - deep, 0.0) / read_beside if read_beside else 0.0
    reading = max(measured["reading"].drafting - first, 0.0) / context
    return DraftCosts(between.tolist(), first, further, reading, beside)


class _SteadyTree(AdaptiveTreeDrafter):
    """Always drafts as many levels of as many tokens, whatever they are worth."""

    def __init__(self, draft: TargetModel, vocab_size: int, levels: int, width: int) -> None:
        costs = DraftCosts([1.0] * (levels * width + 1), first=1.0, further=1.0)
        super().__init__(draft, vocab_size, costs, chain_only=width == 1)
        self._trusts = dict.fromkeys((True, False), _Steady(costs, self._ranks, levels, width))


class _Steady(DraftTrust):
    def __init__(self, costs: DraftCosts, ranks: int, levels: int, width: int) -> None:
        super().__init__(costs, ranks)
        self._levels, self._width = levels, width

    def worth_reading(self, level: int, chance: float, *, nodes: int | None = None) -> bool:
        return level < self._levels

    def worth_reading_beside(self, nodes: int, chance: float) -> bool:
        return True

    def worth_verifying(
        self, level: int, chance: float, *, nodes: int | None = None, promised: float = 0.0
    ) -> bool:
        return (level if nodes is None else nodes) < (level + 1) * self._width


class _FromTheBeginning(_SteadyTree):
    """Reads the whole text at every step."""

    def propose(self, state: DecodingState) -> TokenTree:
        """See AdaptiveTreeDrafter."""
        state.memories.pop(self, None)
        return super().propose(state)
