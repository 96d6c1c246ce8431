"""Where faults are hard to see: coarse rounding, and tokens that change each other little."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1.0, 0.13]  # of the tiny Llama's matrices; the second is that of fresh models


def narrow(model: Any, width: float) -> Any:
    """Its matrices made narrower, so that tokens change each other less."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter *= width
    return model
