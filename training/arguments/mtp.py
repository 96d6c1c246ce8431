"""The flags and YAML keys of a target's own modules. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from medusa_heads.settings import at_least, flag
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments

if TYPE_CHECKING:
    from medusa_heads.training.arguments.rates import RunArguments

MTP_LEARNING_RATE = 1e-3  # at width 384, as new draft models have it


@dataclass(frozen=True)
class MtpArguments:
    """Training the multi-token-prediction modules that a target's checkpoint brings along."""

    mtp: bool = flag(
        False,
        "Go on training the target's own multi-token-prediction modules, in place of new heads; "
        f"the default learning rate is {MTP_LEARNING_RATE}, less for wide targets.",
    )
    mtp_from: str | None = flag(
        None,
        "Begin with the modules of this checkpoint: a folder or hub id of the model that the "
        "target was made from, or of modules trained earlier. Default: the target's own.",
    )
    mtp_depth: int | None = flag(
        None,
        "Tokens drafted in a row while training; behind the last module it reads what itself has "
        "put out, as in drafting. Default: as many as there are modules.",
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "mtp_depth")
        idle = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if idle and not self.mtp:
            raise ValueError(f"{idle[0]} is of the target's own modules: add --mtp")


def mtp_training_arguments(
    arguments: OptimisationArguments, *, autocast: Callable[[str | None], bool] = lambda _: False
) -> RunArguments:
    """`to_training_arguments` for modules, which were trained before."""
    rate = arguments.learning_rate or MTP_LEARNING_RATE
    args = to_training_arguments(
        replace(arguments, learning_rate=rate), "shared", autocast=autocast
    )
    args.rates_by_width = arguments.learning_rate is None
    return args
