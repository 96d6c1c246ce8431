"""What tensors hold: bytes of their storages, counted as operations make them and let them go."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Within the block, every storage that an operation makes.

    Attributes:
        peak: the most bytes that lived at once behind an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._bytes: dict[int, int] = {}
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), made=False)  # weights, and whatever else came from outside
        result = func(*args, **(kwargs or {}))
        self._note(result, made=True)
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        """Bytes of those that are still held."""
        self._known = {
            key: storage for key, storage in self._known.items() if not storage.expired()
        }
        return sum(self._bytes[key] for key in self._known)

    def _note(self, tensors: Any, *, made: bool) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self._known.get(storage._cdata)
                if known is None or known.expired():
                    self._known[storage._cdata] = StorageWeakRef(storage)
                    self._bytes[storage._cdata] = storage.nbytes() if made else 0
