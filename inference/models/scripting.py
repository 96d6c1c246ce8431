"""Decoding texts with scripts once decoding without has cost as much as it takes to begin.

Source: ski rental, see late_compiling.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import ClassVar
from weakref import WeakKeyDictionary

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.engine.capability import capability
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.graphs.captured import CapturedTarget
from medusa_heads.target.graphs.scripted import LEAST_SAVED, ScriptedTarget, scripts
from medusa_heads.target.target import TargetModel

# What is taken for granted before anything is measured: seconds that each layer saves of a forward,
# the forwards that it takes to see whether the model can be decoded so, and the seconds that
# torch's interpreter takes to be ready.
_LAYER_SAVES, _FORWARDS, _SECONDS = 3e-4, 20, 0.2


@contextmanager
def decoding(target: CapturedTarget) -> Iterator[None]:
    """For the block that decodes a text, which has the target's cache for itself."""
    target.is_decoding = True
    try:
        yield
    finally:
        target.is_decoding = False


class Scripting:
    """The texts of one target, by whatever drafts for them, and what decoding those without scripts
    has cost."""

    _known: ClassVar[WeakKeyDictionary[TargetModel, Scripting]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.seconds, self.forwards = 0.0, 0
        self._scripted: ScriptedTarget | None = None
        self._gave_up = False

    @classmethod
    def of(cls, target: TargetModel) -> Scripting:
        """What is known of this target, by all who decode with it."""
        return cls._known.setdefault(target, cls())

    @contextmanager
    def of_text(
        self, target: TargetModel, batch_size: int, slots: int, stats: GenerationStats
    ) -> Iterator[TargetModel]:
        """For the block that decodes a text of so many rows and slots: the target as it does."""
        begins = batch_size == 1 and self._begins(target)
        with self._view(target, slots) if begins else nullcontext() as view:
            if view is not None:
                with decoding(view):
                    yield view
                return
            yield target
        if batch_size == 1:
            self.seconds += stats.total_seconds
            self.forwards += stats.forwards

    def _begins(self, target: TargetModel) -> bool:
        if not self.forwards or self._gave_up:
            return False
        # Scripts keep the model alive, and this is kept by target. A target of another kind may be
        # kept as long as its model lives: of that it is not recorded either.
        if type(target) is not TargetModel:
            return False
        step = self.seconds / self.forwards
        saved = min(_LAYER_SAVES * target.config.num_hidden_layers / step, 1.0)
        return saved >= LEAST_SAVED and self.seconds * saved >= _FORWARDS * step + _SECONDS

    @contextmanager
    def _view(self, target: TargetModel, slots: int) -> Iterator[ScriptedTarget | None]:
        """For the block that decodes a text of so many slots; None where it goes without."""
        if self._scripted is None and scripts(target):
            self._scripted = ScriptedTarget(target.model, target.features, late=True)
        view = self._scripted
        # Another thread's text may have it.
        if view is None or not view.lock.acquire(blocking=False):
            yield None
            return
        try:
            yield view if self._decodes(view, target, slots) else None
        finally:
            view.lock.release()

    def _decodes(self, view: ScriptedTarget, target: TargetModel, slots: int) -> bool:
        if not view.gave_up and not view.serves(1, slots):
            return False
        try:  # what nobody has tried as yet: a cache of fixed size, and masks that are given
            self._gave_up = view.gave_up or capability(view) != capability(target)
        except UnsupportedArchitecture:
            self._gave_up = True
        if self._gave_up:
            self._scripted = None
        return not self._gave_up
