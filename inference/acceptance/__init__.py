"""Which path of a verified tree is kept: lossless unless another rule is named."""

from __future__ import annotations

from typing import Any

from transformers import LogitsProcessorList

from medusa_heads.inference.acceptance.base import AcceptanceRule
from medusa_heads.inference.acceptance.lossless import SampleThenMatch
from medusa_heads.inference.acceptance.rejection import RejectionSampling
from medusa_heads.inference.acceptance.relaxed import (
    LogRatioAcceptance,
    ThresholdAcceptance,
    TypicalAcceptance,
)

__all__ = ["RULES", "AcceptanceRule", "RejectionSampling", "SampleThenMatch", "make_rule"]

RULES: dict[str, type[Any]] = {
    "lossless": RejectionSampling,
    "typical": TypicalAcceptance,
    "threshold": ThresholdAcceptance,
    "log_ratio": LogRatioAcceptance,
}


def make_rule(
    name: str, processors: LogitsProcessorList, do_sample: bool, **settings: float
) -> AcceptanceRule:
    """The rule of that name. Raises ValueError: an unknown name, a setting the rule does not have,
    or a value out of range.

    Args:
        name: `lossless`, or one of the lossy `typical`, `threshold`, `log_ratio`.
        processors: transformers' logits processors and warpers.
        do_sample: draw, rather than take the most likely token.
        settings: of the rule: `epsilon` and `delta`, `threshold`, or `tau`.
    """
    if name not in RULES:
        raise ValueError(f"acceptance must be one of {sorted(RULES)}, got {name!r}")
    if unknown := sorted(set(settings) - set(RULES[name].settings)):
        having = [each for each, rule in sorted(RULES.items()) if unknown[0] in rule.settings]
        hint = f"{' and '.join(having)} acceptance has it" if having else "leave it out"
        raise ValueError(f"{name} acceptance has no setting {unknown[0]!r}: {hint}")
    return RULES[name](processors, do_sample, **settings)
