"""What tensors hold: bytes of their storages, counted as operations make them and let them go."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Within the block, every storage that an operation hands out.

    Attributes:
        peak: the most bytes that lived at once behind an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        """Bytes of those that are still held."""
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        return sum(size for _, size in self._known.values())
