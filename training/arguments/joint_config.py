"""How a target's adapter learns together with heads. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class JointConfig:
    """Joint training of heads and a LoRA adapter in the target (Medusa-2, Cai et al. 2024,
    arXiv:2401.10774, section 2.2.2, whose values are the defaults).

    The loss is `lm_weight * CE + kl_weight * KL(before || now) + heads_weight * heads' loss`: CE of
    the target's own next token, and how far its distribution has moved from that without the
    adapter (equation 3 there, in which either the one or the other preserves the target).

    Args:
        lora_r: rank of the adapter.
        lora_alpha: its factor is lora_alpha / lora_r.
        lora_dropout: share of the adapter's inputs dropped while it learns.
        target_modules: names of the linear modules that get an adapter (the end of the name
            suffices), or `"all-linear"`: all but the lm_head, which the heads share.
        warmup_steps: steps in which heads learn alone; below 1 a share of the run.
        learning_rate: the adapter's peak rate; default: a quarter of the heads'.
        lm_weight: of the target's own cross-entropy.
        kl_weight: of the divergence from the target without adapter.
        heads_weight: of the heads' loss.

    Raises:
        ValueError: a value out of its range, or nothing in the loss that preserves the target.
    """

    lora_r: int = 32
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    warmup_steps: float = 0.2
    learning_rate: float | None = None
    lm_weight: float = 1.0
    kl_weight: float = 1.0
    heads_weight: float = 0.2

    def __post_init__(self) -> None:
        if self.lora_r < 1:
            raise ValueError(f"lora_r must be at least 1, got {self.lora_r}")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must lie in [0, 1), got {self.lora_dropout}")
        for name in ("lora_alpha", "learning_rate", "heads_weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} of joint training must be above 0, got {value}")
        for name in ("lm_weight", "kl_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not self.lm_weight and not self.kl_weight:
            raise ValueError(
                "lm_weight and kl_weight are both 0: nothing would preserve the target's own "
                "predictions; give one of them a weight above 0"
            )
        if not self.target_modules:
            raise ValueError("the adapter needs at least one module: name some, or 'all-linear'")
        steps = self.warmup_steps
        if not 0 <= steps < math.inf or (steps > 1 and steps != int(steps)):
            raise ValueError(
                f"warmup_steps of joint training must be a whole number of steps, or a share of "
                f"the run below 1, got {steps}"
            )

    def warmup(self, max_steps: int) -> int:
        """Steps in which the heads learn alone, of a run of so many."""
        if self.warmup_steps < 1:
            return math.ceil(self.warmup_steps * max_steps)
        return int(self.warmup_steps)
