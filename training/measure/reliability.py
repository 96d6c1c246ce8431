"""Whether heads are right as often as they say.

Shapes: S measured positions.
Source: Guo et al. 2017, "On calibration of modern neural networks", arXiv:1706.04599, section 2:
reliability diagrams, and the expected calibration error of equation 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Bin:
    """Guesses of about the same confidence."""

    count: int
    confidence: float  # mean probability that the head gave its best guess
    accuracy: float  # how often that was the true token


@dataclass(frozen=True)
class HeadCalibration:
    """A head's best guesses, as it makes them and with its logits divided by a temperature.

    Attributes:
        temperature: fitted on the same positions.
        before: bins at temperature 1.
        after: bins at `temperature`.
    """

    temperature: float
    before: Sequence[Bin]
    after: Sequence[Bin]


def reliability(confidence_S: Tensor, right_S: Tensor, bins: int = BINS) -> list[Bin]:
    """Sort guesses into bins of equal width by confidence; empty bins are left out.

    Args:
        confidence_S: probabilities, 0 to 1.
        right_S: whether each guess was right.
        bins: how many there are.
    """
    place_S = (confidence_S.double() * bins).long().clamp(0, bins - 1)
    count = torch.bincount(place_S, minlength=bins)
    confidence = torch.bincount(place_S, confidence_S.double(), minlength=bins)
    right = torch.bincount(place_S, right_S.double(), minlength=bins)
    return [
        Bin(int(n), float(c / n), float(r / n))
        for n, c, r in zip(count.tolist(), confidence.tolist(), right.tolist(), strict=True)
        if n
    ]


def expected_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: the mean gap between confidence and accuracy, 0 to 1."""
    total = sum(part.count for part in bins)
    return sum(part.count * abs(part.confidence - part.accuracy) for part in bins) / max(total, 1)
