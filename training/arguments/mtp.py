"""The flags and YAML keys of a target's own modules. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from medusa_heads.settings import at_least, flag

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
