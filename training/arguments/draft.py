"""The flags and YAML keys of train-draft alone. Light: nothing here imports torch or transformers.

Target, corpora and the course of the run have the flags of train-heads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from medusa_heads.errors import at_least
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments

if TYPE_CHECKING:
    from medusa_heads.training.arguments.loss_config import LossConfig
    from medusa_heads.training.arguments.rates import RunArguments

Divergence = Literal[
    "forward_kl",
    "reverse_kl",
    "jensen_shannon",
    "total_variation",
    "acceptance",
    "cross_entropy",
]
DraftMetric = Literal["acceptance", "agreement", "tokens_per_step_2", "tokens_per_step_4", "loss"]
BUILT_LEARNING_RATE = 1e-3
GIVEN_LEARNING_RATE = 1e-4


@dataclass
class DraftArguments:
    """What the draft model begins as, and how it learns."""

    draft_model: str | None = field(
        default=None,
        metadata={"help": "Train this model (a hub id or a folder) instead of building one."},
    )
    draft_layers: int | None = field(
        default=None,
        metadata={
            "help": "Layers of the draft model, taken evenly from the target's. Default: a "
            "quarter of them."
        },
    )
    draft_hidden_size: int | None = field(
        default=None,
        metadata={"help": "Begin with random weights of this width, not with the target's own."},
    )
    divergence: Divergence = field(
        default="forward_kl",
        metadata={
            "help": "Loss: the divergence between the target's distribution and the draft's; "
            "cross_entropy: learn from the text alone."
        },
    )
    cross_entropy_share: float = field(
        default=0.0,
        metadata={"help": "Share of cross-entropy on the text in the loss, next to divergence."},
    )
    distillation_temperature: float = field(
        default=1.0, metadata={"help": "Temperature of both distributions in the divergence."}
    )
    on_policy_share: float = field(
        default=0.0,
        metadata={"help": "Share of batches that the draft model writes itself (DistillSpec)."},
    )
    on_policy_temperature: float = field(
        default=1.0, metadata={"help": "Temperature at which it writes them."}
    )
    on_policy_refresh: int = field(
        default=50, metadata={"help": "Optimiser steps after which it writes new text."}
    )

    def __post_init__(self) -> None:
        if self.draft_model is not None and (self.draft_layers or self.draft_hidden_size):
            raise ValueError(
                "draft_model names a finished shape: leave draft_layers and draft_hidden_size out"
            )
        for name in ("draft_layers", "draft_hidden_size"):
            if getattr(self, name) is not None:
                at_least(self, 1, name)
        at_least(self, 1, "on_policy_refresh")
        for name in ("distillation_temperature", "on_policy_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.on_policy_share <= 1:
            raise ValueError(f"on_policy_share must lie in [0, 1], got {self.on_policy_share}")
        if not 0 <= self.cross_entropy_share < 1:
            raise ValueError(
                f"cross_entropy_share must lie in [0, 1), got {self.cross_entropy_share}: for "
                "nothing else set divergence to cross_entropy"
            )
        if self.divergence == "cross_entropy" and self.on_policy_share:
            raise ValueError(
                "the draft model's own text is no truth to learn by cross_entropy: choose another "
                "divergence, or leave on_policy_share out"
            )
        self.objective()

    def beginning(self) -> dict[str, Any]:
        """What the draft model begins as, in the words of `begin_draft`."""
        return {
            "draft_model": self.draft_model,
            "num_layers": self.draft_layers,
            "hidden_size": self.draft_hidden_size,
        }

    def objective(self) -> "LossConfig":
        """The terms of the loss."""
        from medusa_heads.training.arguments.loss_config import LossConfig

        terms: dict[str, float] = {self.divergence: 1 - self.cross_entropy_share}
        if self.cross_entropy_share:
            terms["cross_entropy"] = terms.get("cross_entropy", 0) + self.cross_entropy_share
        return LossConfig(terms, temperature=self.distillation_temperature)


@dataclass
class DraftOptimisationArguments(OptimisationArguments):
    """The training run, with what is best for a draft model."""

    output_dir: str = field(
        default="runs/draft",
        metadata={"help": "Folder for the draft model and all that belongs to it."},
    )
    learning_rate: float | None = field(
        default=None,
        metadata={
            "help": f"Peak learning rate. Default: {BUILT_LEARNING_RATE}, less in proportion where "
            f"the draft model is wider than 384; {GIVEN_LEARNING_RATE} for a draft_model that was "
            "trained before."
        },
    )
    metric_for_best_model: DraftMetric = field(  # type: ignore[assignment]
        default="acceptance",
        metadata={
            "help": "What is best on held-out text: the chance that a drawn draft is accepted, how "
            "often the likeliest tokens agree, simulated tokens per step, or the loss."
        },
    )


def draft_training_arguments(
    arguments: DraftOptimisationArguments,
    *,
    given: bool,
    autocast: Callable[[str | None], bool] = lambda _: False,
) -> "RunArguments":
    """The run as transformers.TrainingArguments.

    Args:
        arguments: of the run.
        given: the draft model was trained before, and wants the lower learning rate.
        autocast: see `to_training_arguments`.

    Raises:
        ValueError: as `to_training_arguments`.
    """
    rate = GIVEN_LEARNING_RATE if given else BUILT_LEARNING_RATE
    args = to_training_arguments(
        replace(arguments, learning_rate=arguments.learning_rate or rate), "own", autocast=autocast
    )
    args.rates_by_width = arguments.learning_rate is None and not given
    return args
