"""A target that drafts for itself without any training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from medusa_heads.inference.assisted import AssistedModel
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.lookahead import WINDOW, LookaheadDrafter
from medusa_heads.inference.drafters.recycling import RecyclingDrafter
from medusa_heads.inference.drafters.suffix import SuffixDrafter
from medusa_heads.inference.target_costs import target_costs
from medusa_heads.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFTERS = ("auto", "suffix", "recycling", "lookahead", "lookahead+suffix")
_WIDEST = 31  # nodes of the recycled tree that a step's own tree is picked from


class TrainingFreeModel(AssistedModel):
    """A target for which a drafter drafts that was never trained.

    Args:
        target: the causal LM; it is not modified.
        drafter: `"suffix"`, what followed where the text last ended as it does now; `"recycling"`,
            what the target took to follow each token when it last read it; `"auto"`, both in one
            tree; `"lookahead"`, n-grams of its own parallel guesses at later tokens, and
            `"lookahead+suffix"`. Each verifies at every step as many nodes as pay on this machine.
        acceptance, acceptance_settings, compile, compile_backend: see AssistedModel.

    Raises:
        ValueError: an unknown drafter, or one whose trees the target cannot verify.
        UnsupportedArchitecture: the target cannot be decoded exactly with drafts.
    """

    def __init__(
        self,
        target: TargetModel | PreTrainedModel,
        drafter: str = "auto",
        *,
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        compile: bool = False,
        compile_backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        _check_drafter(drafter)
        super().__init__(
            target,
            acceptance=acceptance,
            acceptance_settings=acceptance_settings,
            compile=compile,
            compile_backend=compile_backend,
        )
        if self._chain_only and drafter != "suffix":
            raise ValueError(
                f"the drafter {drafter!r} adds branches, and this target verifies chains alone: "
                "use 'suffix'"
            )
        self.method = drafter
        self._by_rows: dict[int, Drafter] = {}
        self.drafter = self._drafter_for(1)

    @classmethod
    def from_pretrained(
        cls, target: str | os.PathLike[str], drafter: str = "auto", **kwargs: Any
    ) -> TrainingFreeModel:
        """Load a target by hub id or path, and let it draft for itself.

        Args:
            target: hub id or local folder of a causal LM.
            drafter: see the class.
            kwargs: of the class, or passed on when the target is loaded.

        Raises:
            ValueError: nothing loadable stands there, or see the class.
        """
        names = ("acceptance", "acceptance_settings", "compile", "compile_backend")
        _check_drafter(drafter)  # before seconds of loading
        own = {name: kwargs.pop(name) for name in names if name in kwargs}
        return cls(TargetModel.from_pretrained(str(target), **kwargs), drafter, **own)

    def _drafter_for(self, batch_size: int) -> Drafter:
        if batch_size not in self._by_rows:
            self._by_rows[batch_size] = self._make(batch_size)
        return self._by_rows[batch_size]

    def _make(self, batch_size: int) -> Drafter:
        name, _, suffix = self.method.partition("+")
        if name == "lookahead":
            beside = target_costs(self.target, batch_size, WINDOW)
            return LookaheadDrafter(beside, suffix=bool(suffix))
        costs = target_costs(self.target, batch_size)
        if name == "suffix":
            return SuffixDrafter(costs)
        recycling = RecyclingDrafter(self.target.vocab_size, min(costs.most, _WIDEST))
        return BlendedDrafter(None, costs, cheap=recycling, suffix=name == "auto")


def _check_drafter(drafter: str) -> None:
    if drafter not in DRAFTERS:
        raise ValueError(f"drafter must be one of {', '.join(DRAFTERS)}, got {drafter!r}")
