"""What this machine would have measured, for tests of what is made of it."""

from __future__ import annotations

from typing import Any

from medusa_heads.machine import Measurements, Shape, Use, products


def keep_products(
    shape: Shape,
    seconds: dict[str, float],
    use: Use = "tree",
    store: Measurements | None = None,
    **kept: Any,
) -> Measurements:
    """Products of a shape took so long on one thread of the CPU: `{"float32 1": 0.2, ..}`; kept
    where every process looks, or in a store. What was read before is forgotten."""
    store = store or Measurements()
    facts = {
        "use": use,
        "device": "cpu",
        "dtypes": ["bfloat16", "float32"],
        "threads": [1],
        "matrices": products.matrices(use, shape),
    }
    values = {"seconds": seconds, "spread": 0.0, "attempts": 1}
    store.write(products.KIND, facts, values | kept)
    products._known.clear()
    return store
