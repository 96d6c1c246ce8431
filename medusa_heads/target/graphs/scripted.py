"""A target on a CPU whose forwards are scripts: the operations that the model itself asks for, in
the same order, without the Python that asks for them.

Around its matrices a small model spends a fifth of its forward on that, which a compiler takes
half a minute to save. A script is made in a few forwards, and says bit for bit what the model says.

Shapes: B batch, N tree nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.errors import first_line, warn
from medusa_heads.machine.graphs import look
from medusa_heads.machine.programs import Program, Script, traced
from medusa_heads.target.attention import TreeMask
from medusa_heads.target.cache import RowCache
from medusa_heads.target.graphs.captured import CapturedTarget
from medusa_heads.target.graphs.static_cache import StaticRowCache, explicit_inputs, given_to
from medusa_heads.target.recurrent import is_recurrent
from medusa_heads.target.scans import has_scans
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_SAVED = 0.03  # a share of a forward's seconds that is not worth a script
_SECONDS = 0.3  # that a script is taken to cost, until one has been made
_MOST_SLOTS = 4096  # of a cache, all of which is taken when a text begins
_FEWEST_SEEN = 256  # slots that are attended to; and twice as many, and so on: each is a script
_MOST_CHANGES = 4  # of the model: adapters in turns would want scripts for each text
_ROUNDS = 5  # in which a forward and its script are timed in turns


def scripts(target: TargetModel) -> bool:
    """Whether forwards of this target can become scripts, as far as is known before one does: it
    lies on the CPU as it is, and keeps no states."""
    model: Any = target.model
    moved = hasattr(model, "_hf_hook") or getattr(model, "hf_device_map", None)
    plain = target.device.type == "cpu" and not moved and not getattr(model, "hf_quantizer", None)
    states = is_recurrent(target.config) or has_scans(model)
    return plain and not states


class ScriptedTarget(CapturedTarget):
    """A target that verifies trees over a cache of fixed size, by scripts where it pays, and else
    by its own forward.

    Args:
        late: whether a script waits until forwards without have cost as much as it saves, and is
            done without where it saves nothing.
    """

    _hooked = False  # graphs that others made of the model would be no more

    def __init__(
        self, model: PreTrainedModel, features: tuple[int, ...] = (), late: bool = False
    ) -> None:
        super().__init__(model, features, late=late)
        self.one_shape = self.whole_steps = False
        self._saved = math.nan  # the share of a forward's seconds that the last script saves
        self._cost = _SECONDS  # of a script
        self._changes = 0  # of the model, after which there was no script any more

    def serves(self, batch_size: int, slots: int) -> bool:
        """Whether a text of so many rows and slots can be decoded with scripts. Rows that have
        ended leave a batch, and each number of rows would be another script."""
        few = batch_size == 1 and self.capacity(slots) <= _MOST_SLOTS
        return few and super().serves(batch_size, slots)

    @property
    def is_there(self) -> bool:  # see CapturedTarget
        return self.device.type == "cpu"

    @contextmanager
    def capture_hidden(self) -> Iterator[Callable[[], Tensor]]:
        """See TargetModel; a text begins."""
        hooks, known = self._hooks(), bool(self._recorded)
        try:
            with super().capture_hidden() as wide:
                self._changes += known and not self._recorded
                self.gave_up |= self._changes > _MOST_CHANGES
                yield wide
        finally:
            for hook in hooks:
                hook.remove()

    def warn(self, reason: str) -> None:
        warn(f"decoding goes on without scripts: {reason}", above=2)

    def _like(self, features: tuple[int, ...]) -> ScriptedTarget:
        return ScriptedTarget(self.model, features, self._late)

    def read(
        self, tokens_BN: Tensor, cache: RowCache, mask: TreeMask, last: int | None = None
    ) -> Tensor:
        """As TargetModel.read, by a script where there is one."""
        if self._calls is None or self._forward is not self._compiled:
            return super().read(tokens_BN, cache, mask, last)
        assert isinstance(cache, StaticRowCache)
        self.looks, nodes, rows = False, tokens_BN.shape[1], tokens_BN.numel()
        if (packed := self.packed) is not None:
            packed.look(rows)
        known: dict[Any, Any] = self._recorded.setdefault(cache, {})
        used = mask.first_on_host + nodes
        seen = _seen(used, mask.visible_BNS.shape[2])
        kind = nodes == 1, packed is not None and packed.serve(rows), seen
        forwards: _Forwards = known.setdefault(kind, _Forwards())

        def plain() -> Tensor:
            return TargetModel.read(self, tokens_BN, cache, _of_slots(mask, used), last)

        def scripted() -> Tensor:
            inputs = explicit_inputs(self, tokens_BN, cache, _of_slots(mask, seen))
            with cache.tree_slots(mask.first_on_host, nodes, tokens_BN.device, seen):
                given = [*given_to(inputs), cache.slots_N]
                logits_BNV, *read = self._run_script(forwards, inputs, given, nodes)
            self._captured.put(self.features, read)
            return logits_BNV if last is None else logits_BNV[:, -last:]

        if self.gave_up or not (forwards.serves(nodes) or self._pays(forwards)):
            began = time.perf_counter()
            logits_BNV = plain()
            forwards.spent += time.perf_counter() - began
            return logits_BNV
        logits_BNV = scripted()
        if self._late and not self.gave_up and not forwards.compared:
            times = []
            for _ in range(_ROUNDS):
                times.append((_seconds(plain), _seconds(scripted)))
                cache.set_length(mask.first_on_host)
            self._saved = 1.0 - median(new / old for old, new in times)
            forwards.compared, forwards.refused = True, self._saved < LEAST_SAVED
            self.gave_up = all(each.refused or not each.compared for each in known.values())
        return logits_BNV

    def _pays(self, forwards: _Forwards) -> bool:
        """Whether to make a script, as far as the last one shows what is saved."""
        if forwards.refused:
            return False
        unknown = math.isnan(self._saved)
        return not self._late or unknown or forwards.spent * self._saved >= self._cost

    def _run_script(
        self, forwards: _Forwards, inputs: dict[str, Any], given: list[Tensor], nodes: int
    ) -> list[Tensor]:
        looks = nodes, *map(look, given)
        if forwards.script is not None and looks in forwards.proved and forwards.serves(nodes):
            return forwards.script(given, nodes)

        def forward() -> list[Tensor]:
            logits_BNV = self._checked(inputs)
            return [logits_BNV, *self._captured.tensors(self.features)]

        self.looks = True
        try:
            began = time.perf_counter()
            if not forwards.serves(nodes):
                forwards.note(traced(forward), given, nodes)
                self._cost = time.perf_counter() - began
            assert forwards.script is not None
            said = forwards.script(given, nodes)
            if not all(map(_same_bits, said, forward())):
                raise RuntimeError("a scripted forward says something else than the model")
            forwards.proved.add(looks)
        # What a model's own code, or torch's interpreter, objects to.
        except Exception as error:
            self.gave_up = True
            if not self._late:
                self.warn(first_line(error))
        return forward()


class _Forwards:
    """Forwards over as many slots of one cache that differ in the number of nodes alone.

    Attributes:
        script: of all these, or of one number of nodes; None as yet.
        proved: numbers of nodes, and what was given, of which it has said what the model says.
        spent: seconds without it.
        compared: whether it is known what it saves.
        refused: whether that is too little.
    """

    def __init__(self) -> None:
        self.script: Script | None = None
        self.proved: set[tuple[Any, ...]] = set()
        self.spent = 0.0
        self.compared = self.refused = False

    def serves(self, nodes: int) -> bool:
        """Whether there is a script for so many, which pays as far as is known."""
        return self.script is not None and self.script.size in (None, nodes) and not self.refused

    def note(self, program: Program, given: Sequence[Tensor], nodes: int) -> None:
        """Take a program into account. Raises RuntimeError: it cannot be a script."""
        if program.reshapes:
            raise RuntimeError("a tensor gets another shape in place")
        script = Script(program, given, nodes)
        self.script = script if self.script is None else script.with_other(self.script)
        self.spent, self.proved = 0.0, set()


def _seen(used: int, capacity: int) -> int:
    """How many slots to attend to, where so many are in use."""
    seen = _FEWEST_SEEN
    while seen < used:
        seen *= 2
    return min(seen, capacity)


def _of_slots(mask: TreeMask, slots: int) -> TreeMask:
    bias_BNS = None if mask.bias_BNS is None else mask.bias_BNS[:, :, :slots]
    visible_BNS = mask.visible_BNS[:, :, :slots]
    return replace(mask, visible_BNS=visible_BNS, bias_BNS=bias_BNS, of_groups={})


def _same_bits(one: Tensor, other: Tensor) -> bool:
    bits = (each.contiguous().view(torch.uint8) for each in (one, other))
    return one.dtype == other.dtype and torch.equal(*bits)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
