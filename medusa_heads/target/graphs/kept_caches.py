"""Caches of fixed shapes that are used again, since graphs know where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from medusa_heads.target.graphs.static_cache import StaticRowCache

# What caches of other shapes than the last one may hold together. Each belongs to a graph that
# would have to be compiled anew.
_BYTES_KEPT = 2 << 30


class KeptCaches(dict[tuple[Any, ...], StaticRowCache]):
    """By their shapes; that used last stands last."""

    def take(self, shape: tuple[Any, ...], make: Callable[[], StaticRowCache]) -> StaticRowCache:
        """The cache of a shape, empty; of the others those that were used longest ago are let go
        where they hold too much."""
        cache, room = self.pop(shape, None), _BYTES_KEPT
        for other in reversed(list(self)):
            weight = self[other].held_bytes
            if weight > room:
                del self[other]
            else:
                room -= weight
        self[shape] = cache = make() if cache is None else cache
        cache.reset()
        return cache
