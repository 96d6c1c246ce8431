"""How much of a large matrix is held, or worked on, at a time; and the memory for it.

Products want many rows at a time. What is computed between them in fp32 is quickest on one thread
over so few that all of it stays in the processor's cache: strips.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Bytes of logits held at a time, and pairs that a product should have at least: below them the
# matrix is read from memory for too little work.
CHUNK_BYTES_CPU = 1 << 23
CHUNK_BYTES_GPU = 1 << 28
LEAST_CHUNK = 256
# Of a strip. Several threads have to be woken for every call, which costs more than their caches
# gain: on two, a step with strips of a thread's size took 1.45 times as long. A GPU's caches are
# too small for its many threads: there, too, only calls cost.
STRIP_ELEMENTS_THREAD = 1 << 18
STRIP_ELEMENTS_CPU = 1 << 21
STRIP_ELEMENTS_GPU = 1 << 26


def chunk_pairs(vocab_size: int, device: str, dtype: torch.dtype) -> int:
    """How many pairs' logits are held at a time."""
    budget = CHUNK_BYTES_CPU if device == "cpu" else CHUNK_BYTES_GPU
    return max(budget // (vocab_size * dtype.itemsize), LEAST_CHUNK)


def strips(rows: int, width: int, device: str) -> Iterator[slice]:
    """Rows of a wide matrix that fit a processor's cache, part after part."""
    if device != "cpu":
        budget = STRIP_ELEMENTS_GPU
    else:
        budget = STRIP_ELEMENTS_THREAD if torch.get_num_threads() == 1 else STRIP_ELEMENTS_CPU
    size = max(budget // width, 1)
    return (slice(start, start + size) for start in range(0, rows, size))


class Workspace:
    """Memory that chunk after chunk is written to. Taken anew for each, on a CPU it would cost more
    time than what is computed in it: every page is fetched from the system and cleared."""

    def __init__(self) -> None:
        self._taken: dict[str, Tensor] = {}

    def matrix(
        self, name: str, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Uninitialised, [rows, width]; the next matrix of the same name lies in the same place."""
        taken, size = self._taken.get(name), rows * width
        if taken is None or len(taken) < size or (taken.dtype, taken.device) != (dtype, device):
            taken = self._taken[name] = torch.empty(size, dtype=dtype, device=device)
        return taken[:size].view(rows, width)
