"""A small target's measurements, as if this machine had made them."""

from __future__ import annotations

import torch

from medusa_heads.machine.measurements import Measurements
from medusa_heads.machine.products import Shape, Use
from tests.measured import keep_products

CPU = torch.device("cpu")
SMALL = Shape(hidden=32, intermediate=64, vocab=128, layers=2)
BF16 = torch.bfloat16
SLOW_BF16 = {"float32 1": 0.002, "bfloat16 1": 0.01}
FAST_BF16 = {"float32 1": 0.010, "bfloat16 1": 0.004}


def store_of(seconds: dict[str, float], use: Use = "tree") -> Measurements:
    return keep_products(SMALL, seconds, use)
