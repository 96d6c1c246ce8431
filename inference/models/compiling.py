"""How a target is run: as it is, as CUDA graphs of its own kernels, or through torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.merged import MergedTrees
from medusa_heads.inference.engine.capability import capability
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.inference.models.scripting import Scripting, decoding
from medusa_heads.target.graphs.captured import CapturedTarget, as_it_is, captures
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.graphs.scripted import ScriptedTarget, scripts
from medusa_heads.target.target import TargetModel

Compile: TypeAlias = bool | Literal["auto", "steps", "capture", "kernels"]

_WORDS = (None, False, True, "auto", "steps", "capture", "kernels")
_RECORDED = ("capture", "kernels")


def check_compile(compile: Compile | None, deterministic: bool = False) -> None:
    """Raises ValueError: no such way, or one that goes by clocks for what shall not."""
    if compile not in _WORDS:
        raise ValueError(
            f"compile must be True, False, 'auto', 'steps', 'capture' or 'kernels', got {compile!r}"
        )
    if deterministic and compile == "auto":
        raise ValueError(
            "compile='auto' goes by clocks, which deterministic=True does without: use compile=True"
        )
    if deterministic and compile == "kernels":
        raise ValueError(
            "compile='kernels' rounds in another way from the second forward on, which "
            "deterministic=True does without: use compile='capture' (on the command line, leave "
            "--compile_kernels out)"
        )


def check_one_device(target: TargetModel) -> None:
    """Raises UnsupportedArchitecture: the target is spread over several."""
    devices = set((getattr(target.model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise UnsupportedArchitecture(
            f"the target is spread over {sorted(map(str, devices))}, drafts follow one device",
            "load it on one device, without device_map",
        )


def usual_target(target: TargetModel) -> TargetModel:
    """How it is run where nobody says: its steps are recorded where that can be done. Raises
    UnsupportedArchitecture: it cannot be decoded exactly with drafts."""
    if type(target) is not TargetModel or not captures(target):
        return target
    captured = CapturedTarget(target.model, target.features, "inductor", late=True)
    capability(target)  # as which texts are decoded that are not recorded
    try:
        capability(captured)
    except UnsupportedArchitecture:  # a cache of fixed size, or a mask that is given
        return target
    return target if captured.loses_states else captured


def compiled_target(
    target: TargetModel, compile: Compile, backend: str | Callable[..., object]
) -> TargetModel:
    """The same, run this way; `"auto"` begins without. Raises ValueError: it cannot be captured."""
    if not isinstance(target, CapturedTarget) or not target.is_asked_by(compile, backend):
        target = as_it_is(target)  # recordings, for which nobody may have asked
    if isinstance(target, CompiledTarget) or compile in (False, "auto"):
        return target
    if compile not in _RECORDED:
        # One graph over a cache of fixed size, replayed as a CUDA graph on a GPU.
        return CompiledTarget(target.model, backend, target.features, compile == "steps")
    if not captures(target):
        if compile == "capture" and scripts(target):
            return ScriptedTarget(target.model, target.features)
        raise ValueError(
            f"compile={compile!r} records steps of a target that lies as it is on one NVIDIA GPU, "
            f"and this one is on {target.device}: leave compile out"
        )
    parts = backend if compile == "kernels" else None
    return CapturedTarget(target.model, target.features, parts)


class Views:
    """How each text of a target is decoded where nobody says: recorded or with scripts where that
    can be done and pays, and else as the target is. Where scripts are asked for: where it can be.

    Args:
        may: whether nobody has said.
    """

    def __init__(self, may: bool) -> None:
        self._may = may
        self._target: TargetModel | None = None  # without recordings, once it is needed
        self._drafters: WeakKeyDictionary[Drafter, Drafter] = WeakKeyDictionary()

    @contextmanager
    def of_text(
        self,
        target: TargetModel,
        drafter: Drafter,
        batch_size: int,
        config: Any,
        stats: GenerationStats,
        make_drafter: Callable[[TargetModel], Drafter],
    ) -> Iterator[tuple[TargetModel, Drafter]]:
        """For the block that decodes a text of so many rows, of generate()'s configuration: the
        target as it does, and what drafts for it, perhaps what is made for a view of the target."""
        slots = int(config.max_length or 0) + drafter.num_nodes
        if not self._may and not isinstance(target, ScriptedTarget):
            yield target, drafter
        elif not isinstance(target, CapturedTarget):
            with Scripting.of(target).of_text(target, batch_size, slots, stats) as view:
                yield view, drafter
        elif target.serves(batch_size, slots):
            with decoding(target):
                yield target, drafter
        else:
            self._target = self._target or as_it_is(target)
            # Trees that are merged by tensors alone are for steps that are taken whole.
            merges = isinstance(drafter, MergedTrees)
            if merges and drafter not in self._drafters:
                self._drafters[drafter] = make_drafter(self._target)
            yield self._target, self._drafters[drafter] if merges else drafter
