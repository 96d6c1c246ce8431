"""The flags and YAML keys of train-draft alone. Light: no torch or transformers is imported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from medusa_heads.settings import above_zero, at_least, flag
from medusa_heads.training.arguments.loss_config import LossConfig, Term
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments

if TYPE_CHECKING:
    from medusa_heads.training.arguments.rates import RunArguments

DraftMetric = Literal["acceptance", "agreement", "tokens_per_step_2", "tokens_per_step_4", "loss"]
BUILT_LEARNING_RATE = 1e-3
GIVEN_LEARNING_RATE = 1e-4


@dataclass
class DraftArguments:
    """What the draft model begins as, and how it learns."""

    draft_model: str | None = flag(None, "Train this model (a hub id or folder), not a new one.")
    draft_layers: int | None = flag(
        None, "Layers of the draft model, evenly from the target's. Default: a quarter of them."
    )
    draft_hidden_size: int | None = flag(
        None, "Begin with random weights of this width, not with the target's own."
    )
    divergence: Term = flag(
        "forward_kl",
        "Loss: the divergence between the target's distribution and the draft's; cross_entropy: "
        "learn from the text alone.",
    )
    cross_entropy_share: float = flag(0.0, "Cross-entropy's share of the loss, next to divergence.")
    distillation_temperature: float = flag(1.0, "Temperature of the distributions compared.")
    on_policy_share: float = flag(0.0, "Share of batches the draft writes itself (DistillSpec).")
    on_policy_temperature: float = flag(1.0, "Temperature at which it writes them.")
    on_policy_refresh: int = flag(50, "Optimiser steps after which it writes new text.")

    def __post_init__(self) -> None:
        if self.draft_model is not None and (self.draft_layers or self.draft_hidden_size):
            raise ValueError(
                "draft_model names a finished shape: leave draft_layers and draft_hidden_size out"
            )
        at_least(self, 1, "draft_layers", "draft_hidden_size", "on_policy_refresh")
        above_zero(self, "distillation_temperature", "on_policy_temperature")
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

    def objective(self) -> LossConfig:
        """The terms of the loss."""
        terms: dict[str, float] = {self.divergence: 1 - self.cross_entropy_share}
        if self.cross_entropy_share:
            terms["cross_entropy"] = terms.get("cross_entropy", 0) + self.cross_entropy_share
        return LossConfig(terms, temperature=self.distillation_temperature)


@dataclass
class DraftOptimisationArguments(OptimisationArguments):
    """The training run, with what is best for a draft model."""

    output_dir: str = flag("runs/draft", "Folder for the draft model and all that belongs to it.")
    learning_rate: float | None = flag(
        None,
        f"Peak learning rate. Default: {BUILT_LEARNING_RATE}, less in proportion where "
        f"the draft model is wider than 384; {GIVEN_LEARNING_RATE} for a draft_model that was "
        "trained before.",
    )
    metric_for_best_model: DraftMetric = flag(  # type: ignore[assignment]
        "acceptance",
        "What is best on held-out text: the chance that a drawn draft is accepted, how often the "
        "likeliest tokens agree, simulated tokens per step, or the loss.",
    )


def draft_training_arguments(
    arguments: DraftOptimisationArguments,
    *,
    given: bool,
    autocast: Callable[[str | None], bool] = lambda _: False,
) -> "RunArguments":
    """`to_training_arguments` for a draft model; one that is `given`, trained before, wants the
    lower learning rate."""
    rate = GIVEN_LEARNING_RATE if given else BUILT_LEARNING_RATE
    args = to_training_arguments(arguments, "own", rate=rate, autocast=autocast)
    args.rates_by_width &= not given
    return args
