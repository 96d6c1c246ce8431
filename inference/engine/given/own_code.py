"""A caller's own processors, criteria and streamers: run as generate() runs them, and a copy for
each row of what keeps a state of the text. Rows do not advance in step, so that one object for all
of them would be fed with each row's tokens in turn.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

Kept = TypeVar("Kept")

# None of these holds a state of the text; a closure might.
_SHARED = (nn.Module, PreTrainedTokenizerBase, ModuleType, type)


@contextmanager
def as_generate_runs_it() -> Iterator[None]:
    """Within the block a caller's code may take gradients of its own, and keep what it is given."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def row_copies(original: Kept, batch_size: int) -> list[Kept]:
    """The same object as it is now, once for each row; a single row has the original itself.

    Models and tokenizers within it are shared. Raises ValueError: it cannot be copied, or keeps
    what a copy would share."""
    if batch_size == 1:
        return [original]
    try:
        return [_copy(original) for _ in range(batch_size)]
    # Whatever an object's own code objects to when it is taken apart.
    except Exception as error:
        name = getattr(original, "__name__", type(original).__name__)
        reason = " ".join(str(error).split())[:120]
        raise ValueError(
            f"{name} may keep a state of the text, and cannot be copied for each row of the "
            f"batch ({reason}): decode one row at a time"
        ) from error


def _copy(original: Any) -> Any:
    written = io.BytesIO()
    pickler = _Pickler(written)
    pickler.dump(original)
    written.seek(0)
    return _Unpickler(written, pickler.shared).load()


class _Pickler(pickle.Pickler):
    """Refuses closures, unlike copy.deepcopy, which silently shares them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.shared: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        plain_function = isinstance(obj, FunctionType) and obj.__closure__ is None
        if not plain_function and not isinstance(obj, _SHARED):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: int) -> Any:
        return self._shared[pid]
