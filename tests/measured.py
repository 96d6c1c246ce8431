"""What this machine would have measured, for tests of what is made of it."""

from __future__ import annotations

from typing import Any

from medusa_heads.machine import products
from medusa_heads.machine.measurements import Measurements
from medusa_heads.machine.products import Shape, Use


def keep_products(shape: Shape, seconds: dict[str, float], use: Use = "tree") -> Measurements:
    """Products of a shape took so long on one thread of the CPU: `{"float32 1": 0.2, ..}`; kept
    where every process looks, which is returned. What was read before is forgotten."""
    store = Measurements()
    facts: dict[str, Any] = {
        "use": use,
        "device": "cpu",
        "dtypes": ["bfloat16", "float32"],
        "threads": [1],
        "matrices": products.matrices(use, shape),
    }
    store.write(products.KIND, facts, {"seconds": seconds})
    products._known.clear()
    return store
