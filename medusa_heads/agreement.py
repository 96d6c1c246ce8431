"""Whether two forwards say the same.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# In whole and in half precision: root mean square over the vocabulary, in standard deviations of
# the logits. Forwards of unlike shapes round differently: by 1e-6 in fp32, by hundredths in half
# precision, and by tenths where another expert is chosen.
TOLERANCE = (1e-3, 0.2)


def is_half(dtype: torch.dtype) -> bool:
    """Whether a target of this dtype computes in half precision."""
    return dtype not in (torch.float32, torch.float64)


def relative_error(got_TV: Tensor, expected_TV: Tensor) -> float:
    """The worst token's difference, in standard deviations of the logits."""
    rms_T = (got_TV - expected_TV).square().mean(dim=-1).sqrt()
    scale_T = expected_TV.std(dim=-1).clamp_min(1e-6)
    error = float((rms_T / scale_T).max())
    return error if error == error else float("inf")  # NaN is no agreement


def same_oddities(one: Tensor, other: Tensor) -> bool:
    """Whether both are infinite in the same places, and no numbers in the same."""
    odd, others = (each.where(~each.isfinite(), 0.0).nan_to_num() for each in (one, other))
    return torch.equal(odd, others) and torch.equal(one.isnan(), other.isnan())


def finite(numbers: Tensor) -> Tensor:
    """Numbers, and 0 for what is infinite or none."""
    return numbers.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
