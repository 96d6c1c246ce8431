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

_LENGTHS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class DraftCosts:
    """Seconds of the parts of a step.

    Attributes:
        verification: verifying 0, 1, 2, .. drafted tokens; never less for more of them.
        first: drafting the first token, with all that was committed read before.
        further: drafting each further one.
    """

    verification: Sequence[float]
    first: float
    further: float

    @property
    def most(self) -> int:
        """The most tokens to draft."""
        return len(self.verification) - 1

    def seconds(self, verified: int, forwards: int) -> float:
        """Of a step with so many drafted tokens and forwards of the draft model."""
        drafting = self.first + (forwards - 1) * self.further if forwards else 0.0
        return self.verification[verified] + drafting


def draft_costs(target: TargetModel, draft: TargetModel, batch_size: int = 1) -> DraftCosts:
    """Measured costs of both models, on this machine.

    Raises:
        ValueError: the target's context leaves no room to measure.
    """
    lengths = [n for n in _LENGTHS if n < min(room(target), room(draft))]
    # The plain step comes first: the draft model reads what it has committed.
    drafters: dict[str, Drafter] = {"0": RootChain(0)}
    drafters |= {str(n): DraftModelDrafter(draft, target.vocab_size, depth=n) for n in lengths}
    model = draft.config.to_dict() | {"_name_or_path": None}
    kind = {"kind": "draft model", "draft": model, "dtype": str(draft.dtype)}
    measured = step_seconds(target, drafters, kind, DEFAULT_CONTEXT, batch_size)
    known = [0, *lengths]
    verifying = [measured[str(n)].step - measured[str(n)].drafting for n in known]
    between = np.interp(range(known[-1] + 1), known, list(accumulate(verifying, max)))
    drafting = [measured[str(n)].drafting for n in lengths]
    # The slope of the longest says most about what a forward costs.
    steps = max(lengths[-1] - lengths[0], 1)
    further = (drafting[-1] - drafting[0]) / steps if len(lengths) > 1 else drafting[0]
    return DraftCosts(between.tolist(), first=drafting[0], further=max(further, 0.0))
