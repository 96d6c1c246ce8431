"""A target in this process that answers prompts itself."""

from __future__ import annotations

from typing import Any, ClassVar

from medusa_heads.inference.regeneration.answers import Backend
from medusa_heads.target.target import TargetModel


class TargetBackend(Backend):
    """What the ways in which a target in memory answers have in common.

    Args:
        target: as loaded.
        batch_size: prompts that are under way at the same time.

    Raises:
        ValueError: a size below one.
    """

    name: ClassVar[str]

    def __init__(self, target: TargetModel, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"expected a batch_size of at least 1, got {batch_size}")
        self.target = target
        self.batch_size = batch_size
        self.max_positions = target.max_positions

    def describe(self) -> dict[str, Any]:
        """The weights, bit for bit, and how the target decodes by default."""
        return {
            "backend": self.name,
            "weights_sha256": self.target.weights_digest(),
            "dtype": str(self.target.dtype),
            "generation_config": self.target.model.generation_config.to_dict(),
        }
