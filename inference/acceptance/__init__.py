"""Which path of a verified tree is kept: lossless unless another rule is named."""

from __future__ import annotations

import inspect
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

RULES: dict[str, type[Any]] = {
    "lossless": RejectionSampling,
    "typical": TypicalAcceptance,
    "threshold": ThresholdAcceptance,
    "log_ratio": LogRatioAcceptance,
}


def make_rule(
    name: str, processors: LogitsProcessorList, do_sample: bool, **settings: float
) -> AcceptanceRule:
    """The rule of that name.

    Args:
        name: `lossless`, or one of the lossy `typical`, `threshold`, `log_ratio`.
        processors: transformers' logits processors and warpers.
        do_sample: draw, rather than take the most likely token.
        settings: of the rule: `epsilon` and `delta`, `threshold`, or `tau`.

    Raises:
        ValueError: an unknown name, a setting the rule does not have, or a value out of range.
    """
    if name not in RULES:
        raise ValueError(f"acceptance must be one of {sorted(RULES)}, got {name!r}")
    known = {
        parameter.name
        for parameter in inspect.signature(RULES[name]).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"{name} acceptance has no setting {unknown}; it has {sorted(known)}")
    rule: AcceptanceRule = RULES[name](processors, do_sample, **settings)
    return rule


__all__ = [
    "RULES",
    "AcceptanceRule",
    "LogRatioAcceptance",
    "RejectionSampling",
    "SampleThenMatch",
    "ThresholdAcceptance",
    "TypicalAcceptance",
    "make_rule",
]
