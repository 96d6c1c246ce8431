"""Safetensors files, read with suspicion: whoever made them may have been cut off, or mean harm."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {"F32", "F16", "BF16", "I64"}


def tensor_shapes(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a safetensors file, read off its header alone.

    Raises:
        ValueError: there is none, it is damaged, or it holds a dtype that heads are not stored in.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ValueError(f"expected the heads' weights at {str(path)!r}, found none")
    shapes = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                part = file.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise ValueError(
                        f"{path}: {name} is stored as {part.get_dtype()}, expected one of "
                        f"{sorted(_DTYPES)}"
                    )
                shapes[name] = tuple(part.get_shape())
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({_one_line(error)}): download or train it anew"
        ) from error
    return shapes


def check_no_notes(path: str | os.PathLike[str]) -> None:
    """Raises ValueError where a safetensors file says more than its tensors: its header has room
    for anything."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        if notes := set(file.metadata() or {}) - {"format"}:
            raise ValueError(
                f"{path} holds notes beside its tensors ({sorted(notes)[0]!r}): write it anew"
            )


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file.

    Raises:
        ValueError: there is none, it is damaged, or a value in it is not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensor_shapes(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({_one_line(error)}): download or train it anew"
        ) from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: {name} holds NaN or infinite values: train it anew")
    return tensors


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
