"""What drafting with a draft model costs here, measured once and kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from medusa_heads.inference.drafters.draft_model import DraftModelDrafter
from medusa_heads.inference.step_seconds import DEFAULT_CONTEXT, room, step_seconds
from medusa_heads.inference.target_costs import RootChain
from medusa_heads.target import TargetModel

if TYPE_CHECKING:
    from medusa_heads.inference.drafters.base import Drafter
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree

_LENGTHS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class DraftCosts:
    """Seconds of the parts of a step.

    Attributes:
        verification: verifying 0, 1, 2, .. drafted tokens; never less for more of them.
        first: drafting the first token, with all that was committed before the last step read.
        further: drafting each further one.
        reading: each token of the text that is still to be read besides.
    """

    verification: Sequence[float]
    first: float
    further: float
    reading: float = 0.0

    @property
    def most(self) -> int:
        """The most tokens to draft."""
        return len(self.verification) - 1

    def seconds(self, verified: int, forwards: int) -> float:
        """Of a step with so many drafted tokens and forwards of the draft model; of more tokens
        than were measured, as if each cost what the last ones did."""
        drafting = self.first + (forwards - 1) * self.further if forwards else 0.0
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
    lengths = [n for n in _LENGTHS if n < min(room(target), room(draft))]
    # The plain step comes first: the draft model reads what it has committed.
    drafters: dict[str, Drafter] = {"0": RootChain(0)}
    drafters |= {str(n): DraftModelDrafter(draft, target.vocab_size, depth=n) for n in lengths}
    drafters["reading"] = _FromTheBeginning(draft, target.vocab_size, depth=1)
    model = draft.config.to_dict() | {"_name_or_path": None}
    kind = {"kind": "draft model", "draft": model, "dtype": str(draft.dtype)}
    context = min(DEFAULT_CONTEXT, room(target))
    measured = step_seconds(target, drafters, kind, context, batch_size)
    known = [0, *lengths]
    verifying = [measured[str(n)].step - measured[str(n)].drafting for n in known]
    # Fewer tokens never cost more. Where a measurement says so, something else ran meanwhile: the
    # lower one is right.
    believed = list(accumulate(reversed(verifying), min))[::-1]
    between = np.interp(range(known[-1] + 1), known, believed)
    drafting = [measured[str(n)].drafting for n in lengths]
    # The slope of the longest says most about what a forward costs.
    steps = max(lengths[-1] - lengths[0], 1)
    further = (drafting[-1] - drafting[0]) / steps if len(lengths) > 1 else drafting[0]
    reading = max(measured["reading"].drafting - drafting[0], 0.0) / context
    return DraftCosts(between.tolist(), drafting[0], max(further, 0.0), reading)


class _FromTheBeginning(DraftModelDrafter):
    """Reads the whole text at every step."""

    def propose(self, state: DecodingState) -> TokenTree:
        """See DraftModelDrafter."""
        state.memories.pop(self, None)
        return super().propose(state)
