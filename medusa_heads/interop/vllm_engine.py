"""vLLM's engine within this process. It is no requirement of this package: who asks for it has
installed it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

from medusa_heads.errors import first_line

# Arguments that say where and how fast vLLM works. Any other may change what it computes.
_NO_MATTER = frozenset(
    {
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
        "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager",
        "hf_token", "download_dir",
    }
)  # fmt: skip


def that_matter(engine: Mapping[str, Any], besides: Collection[str] = ()) -> dict[str, Any]:
    """The arguments that may change what vLLM computes: with others, all is computed anew. Some
    `besides` may be known to change nothing."""
    other = _NO_MATTER.union(besides)
    return {name: engine[name] for name in sorted(engine) if name not in other}


def import_vllm(module: str = "vllm") -> Any:
    """The package, or a module of it; ValueError where it is not there, or cannot be imported."""
    try:
        return import_module(module)
    except ImportError as error:
        if getattr(error, "name", None) == "vllm":
            reason = "and it is not installed: pip install vllm"
        else:
            reason = f"which cannot be imported here: {first_line(error)}"
        raise ValueError(f"the backend vllm needs vLLM, {reason}") from error


def open_engine(model: str, **arguments: Any) -> Any:
    """A `vllm.LLM`. Raises ValueError: vLLM is not installed, or cannot run the model so."""
    vllm = import_vllm()
    try:
        return vllm.LLM(model, **arguments)
    except (RuntimeError, TypeError, ValueError, OSError) as error:
        # Pydantic's first line says nothing, and its others what was given, which may be secret.
        details = error.errors() if hasattr(error, "errors") else []
        reason = str(details[0]["msg"]) if details else first_line(error)
        raise ValueError(f"vLLM {vllm.__version__} cannot run {model!r}: {reason}") from error
