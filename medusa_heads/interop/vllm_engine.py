"""vLLM's engine within this process. It is no requirement of this package: who asks for it has
installed it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from medusa_heads.errors import first_line


def import_vllm(module: str = "vllm") -> Any:
    """The package, or a module of it; ValueError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            "the backend vllm needs vLLM, and it is not installed: pip install vllm"
        ) from error


def open_engine(model: str, **arguments: Any) -> Any:
    """A `vllm.LLM`. Raises ValueError: vLLM is not installed, or cannot run the model so."""
    vllm = import_vllm()
    try:
        return vllm.LLM(model, **arguments)
    except (RuntimeError, TypeError, ValueError, OSError) as error:
        raise ValueError(
            f"vLLM {vllm.__version__} cannot run {model!r}: {first_line(error)}"
        ) from error
