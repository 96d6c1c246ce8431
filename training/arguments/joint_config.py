"""How a target's adapter learns together with heads. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from medusa_heads.settings import at_least, flag

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class JointConfig:
    """Joint training of heads and a LoRA adapter in the target (Medusa-2, Cai et al. 2024,
    arXiv:2401.10774, section 2.2.2, whose values are the defaults). The loss is `lm_weight * CE +
    kl_weight * KL(before || now) + heads_weight * heads' loss`: CE of the target's own next token,
    and how far its distribution has moved from that without the adapter (equation 3 there, in which
    either the one or the other preserves the target). ValueError: a value is out of its range, or
    nothing in the loss preserves the target."""

    lora_r: int = flag(32, "Rank of the adapter.")
    lora_alpha: float = flag(16.0, "Scale: the adapter's output counts lora_alpha / lora_r.")
    lora_dropout: float = flag(0.0, "Dropout before the adapter.")
    target_modules: Sequence[str] = flag(
        [ALL_LINEAR],
        "Linear modules that get an adapter, by the ends of their names; all-linear: all but the "
        "lm_head.",
        "--lora_target_modules",
    )
    warmup_steps: float = flag(
        0.2, "Steps of the heads alone; below 1 a share of the run.", "--joint_warmup_steps"
    )
    learning_rate: float | None = flag(
        None, "Peak rate of the adapter. Default: a quarter of the heads'.", "--lora_learning_rate"
    )
    lm_weight: float = flag(
        1.0, "Weight of the target's own cross-entropy; 0 on its own text.", "--joint_lm_weight"
    )
    kl_weight: float = flag(
        1.0, "Weight of the KL divergence from the target without adapter.", "--joint_kl_weight"
    )
    heads_weight: float = flag(0.2, "Weight of the heads' own loss.", "--joint_heads_weight")

    def __post_init__(self) -> None:
        if not isinstance(modules := self.target_modules, str):
            given = ALL_LINEAR if list(modules) == [ALL_LINEAR] else tuple(modules)
            object.__setattr__(self, "target_modules", given)
        at_least(self, 1, "lora_r")
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
