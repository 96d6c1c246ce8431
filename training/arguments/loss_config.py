"""What heads learn: a mixture of terms, and how much each head counts. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

HeadWeights = Literal["decay", "acceptance"]

TERMS = (
    "cross_entropy",
    "forward_kl",
    "reverse_kl",
    "jensen_shannon",
    "total_variation",
    "acceptance",
)


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

    Args:
        terms: weight of each term.
        temperature: p and q of the terms with p are those of sampling at this temperature;
            cross-entropy is always at 1.
        head_weights: `"decay"`, head i counts decay**i; `"acceptance"`, each pair counts as much as
            the expected length of the accepted draft hangs on it (D-PACE; see `head_weights.py`).
        decay: weight of head i + 1 relative to head i.
        smoothing: of `"acceptance"`: 1 counts every pair as if all drafts were accepted, values
            towards 0 trust the heads' own confidence more.

    Raises:
        ValueError: an unknown name, or a number out of its range.
    """

    terms: Mapping[str, float] = field(default_factory=lambda: {"cross_entropy": 1.0})
    temperature: float = 1.0
    head_weights: HeadWeights = "decay"
    decay: float = 0.8
    smoothing: float = 0.5

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError(f"the loss needs at least one term of {list(TERMS)}")
        for name, weight in self.terms.items():
            if name not in TERMS:
                raise ValueError(f"unknown loss term {name!r}; known: {list(TERMS)}")
            if not (isinstance(weight, (int, float)) and 0 < weight < math.inf):
                raise ValueError(f"loss term {name!r} needs a weight above 0, got {weight!r}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"the loss's temperature must be above 0, got {self.temperature}")
        if self.temperature != 1 and not self.needs_teacher:
            raise ValueError(
                "a temperature changes only terms with the target's own distribution: add one of "
                f"{list(TERMS[1:])}, or leave the temperature at 1"
            )
        if self.head_weights not in get_args(HeadWeights):
            raise ValueError(
                f"head_weights must be one of {list(get_args(HeadWeights))}, got "
                f"{self.head_weights!r}"
            )
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
