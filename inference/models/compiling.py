"""How a target is run: as it is, as CUDA graphs of its own kernels, or through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from medusa_heads.target.captured import CapturedTarget, captures
from medusa_heads.target.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel

Compile: TypeAlias = bool | Literal["auto", "steps", "capture"]

_WORDS = (None, False, True, "auto", "steps", "capture")


def check_compile(compile: Compile | None, deterministic: bool = False) -> None:
    """Raises ValueError: no such way, or one that goes by clocks for what shall not."""
    if compile not in _WORDS:
        raise ValueError(
            f"compile must be True, False, 'auto', 'steps' or 'capture', got {compile!r}"
        )
    if deterministic and compile == "auto":
        raise ValueError(
            "compile='auto' goes by clocks, which deterministic=True does without: use compile=True"
        )


def usual_target(target: TargetModel) -> TargetModel:
    """How it is run where nobody says: its steps are recorded where that can be done."""
    if isinstance(target, CompiledTarget) or not captures(target):
        return target
    return CapturedTarget(target.model, target.features)


def as_it_is(target: TargetModel) -> TargetModel:
    """The same without recordings."""
    if isinstance(target, CapturedTarget):
        return TargetModel(target.model).with_features(target.features)
    return target


def compiled_target(
    target: TargetModel, compile: Compile, backend: str | Callable[..., object]
) -> TargetModel:
    """The same, run this way; `"auto"` begins without. Raises ValueError: it cannot be captured."""
    if isinstance(target, CompiledTarget) or compile in (False, "auto"):
        return target
    if compile != "capture":
        # One graph over a cache of fixed size, replayed as a CUDA graph on a GPU.
        return CompiledTarget(target.model, backend, target.features, compile == "steps")
    if not captures(target):
        raise ValueError(
            "compile='capture' records steps of a target that lies as it is on one NVIDIA GPU, and "
            f"this one is on {target.device}: leave compile out"
        )
    return CapturedTarget(target.model, target.features)
