"""Going on with a text through another view of its target."""

from __future__ import annotations

from abc import ABC, abstractmethod

from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.target import TargetModel


class Exchange(ABC):
    """Decides with what a text is decoded further, before every step of it."""

    @abstractmethod
    def due(self, state: DecodingState, slots: int) -> bool:
        """Whether to ask for another view; the text may come to need so many cache slots."""

    @abstractmethod
    def view(self, state: DecodingState, slots: int) -> tuple[TargetModel, Drafter] | None:
        """Another view of the same target, and its drafter; None where there is none after all."""
