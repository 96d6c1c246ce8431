"""What drafting with a draft model costs here, measured once and kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from medusa_heads.inference.capability import capability
from medusa_heads.inference.drafters.draft_model import DraftModelDrafter
from medusa_heads.inference.drafters.sampled_tree import SampledTreeDrafter
from medusa_heads.inference.step_seconds import DEFAULT_CONTEXT, room, step_seconds
from medusa_heads.inference.target_costs import RootChain
from medusa_heads.target import TargetModel

if TYPE_CHECKING:
    from medusa_heads.inference.drafters.base import Drafter
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree

_VERIFIED = (1, 2, 4, 8, 15, 23, 31, 47, 63)  # with the root, matrix units take 16 at a time
_DRAFTED = 8  # levels, of the longer of the two drafts that are timed
_WIDE = (4, 1, 1, 1)  # tokens behind each node of one that is as wide as it is deep
_READ_BESIDE = 9  # nodes that are read in it beside the first of each level
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
    depth = max(min(_DRAFTED, fits - 1), 1)
    wide = _wide(target, draft, fits)
    drafters: dict[str, Drafter] = {f"verify:{n}": RootChain(n) for n in sizes}
    drafters |= {
        f"draft:{n}": DraftModelDrafter(draft, target.vocab_size, depth=n) for n in (1, depth)
    }
    drafters |= {"wide": wide} if wide is not None else {}
    drafters["reading"] = _FromTheBeginning(draft, target.vocab_size, depth=1)
    model = draft.config.to_dict() | {"_name_or_path": None}
    kind = {"kind": "draft model", "draft": model, "dtype": str(draft.dtype)}
    context = min(DEFAULT_CONTEXT, room(target))
    measured = step_seconds(target, drafters, kind, context, batch_size)
    # Fewer tokens never cost more. Where a measurement says so, something else ran meanwhile: the
    # lower one is right.
    verifying = [measured[f"verify:{n}"].step for n in sizes]
    believed = list(accumulate(reversed(verifying), min))[::-1]
    between = np.interp(range(sizes[-1] + 1), sizes, believed)
    first, deep = measured["draft:1"].drafting, measured[f"draft:{depth}"].drafting
    further = max(deep - first, 0.0) / (depth - 1) if depth > 1 else first
    reading = max(measured["reading"].drafting - first, 0.0) / context
    beside = 0.0
    if wide is not None:
        narrow = first + (len(_WIDE) - 1) * further
        beside = max(measured["wide"].drafting - narrow, 0.0) / _READ_BESIDE
    return DraftCosts(between.tolist(), first, further, reading, beside)


def _wide(target: TargetModel, draft: TargetModel, fits: int) -> Drafter | None:
    """A draft of several paths; None where there can be none."""
    chain_only = "chain" in (capability(target), capability(draft))
    if chain_only or fits <= sum(_WIDE) * _WIDE[0] or target.vocab_size < _WIDE[0]:
        return None
    return SampledTreeDrafter(draft, target.vocab_size, _WIDE)


class _FromTheBeginning(DraftModelDrafter):
    """Reads the whole text at every step."""

    def propose(self, state: DecodingState) -> TokenTree:
        """See DraftModelDrafter."""
        state.memories.pop(self, None)
        return super().propose(state)
