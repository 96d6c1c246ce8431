"""What heads learn: a mixture of terms, and how much each head counts. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from medusa_heads.files import parse_json
from medusa_heads.settings import flag, one_of

HeadWeights = Literal["decay", "acceptance"]

Term = Literal[
    "cross_entropy", "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "acceptance"
]
TERMS: tuple[str, ...] = get_args(Term)


@dataclass(frozen=True)
class LossConfig:
    """A weighted sum of terms for each supervised pair of a position and a head.

    q is what the head predicts for a token, p what the target itself predicts for the same token
    once it has read all text before it.

    - `cross_entropy`: -log q(true token) (Cai et al. 2024, arXiv:2401.10774, equation 1)
    - `forward_kl`: KL(p || q); `reverse_kl`: KL(q || p); `jensen_shannon`: half of
      KL(p || m) + KL(q || m) with m = (p + q) / 2; `total_variation`: sum |p - q| / 2
      (compared for drafting by Zhou et al. 2023, DistillSpec, arXiv:2310.08461)
    - `acceptance`: -log sum min(p, q), the log of the chance that a token drawn from q is accepted
      (Samarin et al. 2026, LK losses, arXiv:2602.23881)

    The temperature is that of p and q; cross-entropy is always at 1. Head weights by `"acceptance"`
    are those of D-PACE (see `loss/heads.py`). ValueError: an unknown name, a number out of range.
    """

    terms: Mapping[str, float] = flag(
        "cross_entropy",
        f"One of {', '.join(TERMS)}, or a mixture: cross_entropy=0.5,reverse_kl=0.5 (in YAML also "
        "as a mapping). All but cross_entropy learn from the target's own distribution.",
        "--loss",
    )
    temperature: float = flag(
        1.0, "Sampling temperature at which heads should resemble the target.", "--loss_temperature"
    )
    head_weights: HeadWeights = flag(
        "decay",
        "Weights of the heads in the loss. decay: head i counts head_loss_decay**i; acceptance: "
        "each guess counts by what it adds to the expected accepted length.",
    )
    decay: float = flag(
        0.8, "With decay: how much a head counts relative to the one before.", "--head_loss_decay"
    )
    smoothing: float = flag(
        0.5,
        "With acceptance: a head's probability c of the true token counts as (1 - s) c + s, s "
        "being this number. 1: as if all drafts were accepted.",
        "--head_weight_smoothing",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "terms", _weights(self.terms))
        for name, weight in self.terms.items():
            if name not in TERMS:
                raise ValueError(f"unknown loss term {name!r}; known: {list(TERMS)}")
            if not 0 < weight < math.inf:
                raise ValueError(f"loss term {name!r} needs a weight above 0, got {weight!r}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"the loss's temperature must be above 0, got {self.temperature}")
        if self.temperature != 1 and not self.needs_teacher:
            raise ValueError(
                "a temperature changes only terms with the target's own distribution: add one of "
                f"{list(TERMS[1:])}, or leave the temperature at 1"
            )
        one_of(self, "head_weights", get_args(HeadWeights))
        for name in ("decay", "smoothing"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}")

    def weight(self, term: str) -> float:
        """The weight of a term, 0 where it plays no part."""
        return self.terms.get(term, 0.0)

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's own distribution plays a part."""
        return any(name != "cross_entropy" for name in self.terms)

    @property
    def needs_overlap(self) -> bool:
        """Whether sum min(p, q) plays a part: there p is never renormalised."""
        return bool(self.weight("total_variation") or self.weight("acceptance"))


def _weights(given: Mapping[str, Any] | str | None) -> dict[str, float]:
    """`"name"`, `"name=weight,name=weight"`, a mapping or its JSON, as weights by name."""
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
