"""The flags and YAML keys of the loss. Light: nothing here imports torch or transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from medusa_heads.files import parse_json
from medusa_heads.training.arguments.loss_config import TERMS, LossConfig


@dataclass
class LossArguments:
    """What the heads learn."""

    loss: dict | str | None = field(
        default="cross_entropy",
        metadata={
            "help": f"One of {', '.join(TERMS)}, or a mixture: cross_entropy=0.5,reverse_kl=0.5 "
            "(in YAML also as a mapping). All but cross_entropy learn from the target's own "
            "distribution."
        },
    )
    loss_temperature: float = field(
        default=1.0,
        metadata={"help": "Sampling temperature at which heads should resemble the target."},
    )
    head_weights: Literal["decay", "acceptance"] = field(
        default="decay",
        metadata={
            "help": "Weights of the heads in the loss. decay: head i counts head_loss_decay**i; "
            "acceptance: each guess counts by what it adds to the expected accepted length."
        },
    )
    head_loss_decay: float = field(
        default=0.8,
        metadata={"help": "With decay: how much a head counts relative to the one before it."},
    )
    head_weight_smoothing: float = field(
        default=0.5,
        metadata={
            "help": "With acceptance: a head's probability c of the true token counts as "
            "(1 - s) c + s, s being this number. 1: as if all drafts were accepted."
        },
    )

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> LossConfig:
        """The same as a LossConfig.

        Raises:
            ValueError: an unknown term, or a number out of its range.
        """
        for name in ("head_loss_decay", "head_weight_smoothing"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}")
        return LossConfig(
            parse_terms(self.loss),
            temperature=self.loss_temperature,
            head_weights=self.head_weights,
            decay=self.head_loss_decay,
            smoothing=self.head_weight_smoothing,
        )


def parse_terms(given: Mapping[str, Any] | str | None) -> dict[str, float]:
    """`"name"`, `"name=weight,name=weight"`, a mapping or its JSON, as weights by name.

    Raises:
        ValueError: it is none of these; whether the names are known is not looked at.
    """
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = parse_json(given)
        except ValueError as error:
            raise ValueError(f"loss is not valid JSON: {given!r}") from error
    if not given:
        raise ValueError(f"loss needs at least one term of {list(TERMS)}")
    if isinstance(given, str):
        parts = [part.strip().partition("=") for part in given.split(",")]
        terms: dict[str, Any] = {name.strip(): value if sign else 1 for name, sign, value in parts}
        if len(terms) < len(parts):
            raise ValueError(f"loss names a term twice: {given!r}")
    else:
        terms = dict(given)
    weights = {}
    for name, value in terms.items():
        try:
            weights[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"loss term {name!r} needs a number, got {value!r}") from None
    return weights
