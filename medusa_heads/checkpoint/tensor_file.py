"""Safetensors files, read with suspicion: whoever made them may have been cut off, or mean harm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from medusa_heads.errors import first_line
from medusa_heads.files import why_closed

_BEGINNINGS = {
    b"GGUF": "it is a GGUF file, for llama.cpp: take the one that it was made from",
    b"version https://git-lfs": "it is git-lfs's note of where the file lies: run git lfs pull",
    b"<": "it is a page of the web: download the file itself",
}
_OF_TORCH = (b"PK", b"\x80")  # a zip, a pickle
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file as transformers does. OSError where it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, a quota
        raise OSError(f"{path} cannot be written ({first_line(error)})") from error


def mapped_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, none of whose values is read before it is looked at.
    Raises ValueError: there is none, it is damaged, or it holds a dtype that heads are not stored
    in."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not Path(path).is_file():
        raise ValueError(f"expected the heads' weights at {str(path)!r}, found none")
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ValueError(f"{path} {why_closed(error)}") from error
    try:
        tensors = load_file(path)
    # TypeError: a size that torch's integers do not hold.
    except (SafetensorError, OSError, RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({why_unreadable(path, error)})") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{path}: {name} is stored as {tensor.dtype}, expected one of "
                f"{sorted(_DTYPES.values())}"
            )
    return tensors


def why_unreadable(path: str | os.PathLike[str], error: Exception) -> str:
    """What a file is that is no file of tensors, by how it begins, and what to do; else what its
    reader said."""
    try:
        with open(path, "rb") as file:
            beginning = file.read(64)
    except OSError:
        beginning = b""
    # Eight bytes of a safetensors file say how long its header is, and are never full.
    if any(beginning[4:8]):
        for mark, what in _BEGINNINGS.items():
            if beginning.startswith(mark):
                return what
        if beginning.startswith(_OF_TORCH) and Path(path).suffix == ".safetensors":
            return "it is a file of torch.save under another's name: rename it to .pt"
    return f"{first_line(error).partition('. ')[0]}: download or train it anew"


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file. Raises ValueError: see `mapped_tensors`; or a value is
    not finite."""
    tensors = mapped_tensors(path)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: {name} holds NaN or infinite values: train it anew")
    return tensors


def check_no_notes(path: str | os.PathLike[str]) -> None:
    """Raises ValueError where a safetensors file says more than its tensors: its header has room
    for anything."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        if notes := set(file.metadata() or {}) - {"format"}:
            raise ValueError(
                f"{path} holds notes beside its tensors ({sorted(notes)[0]!r}): write it anew"
            )
