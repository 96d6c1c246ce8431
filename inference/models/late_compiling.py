"""Compiling a target's verification once decoding without that has cost as much as it does.

Source: ski rental. Whoever rents until the rent has come to the price, and buys then, never pays
more than twice what the best choice would have cost.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import torch

from medusa_heads.errors import UnsupportedArchitecture, first_line, warn
from medusa_heads.inference.adapt.measure import target_facts
from medusa_heads.inference.adapt.step_bench import RandomChain, StepBench
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.engine.decoding import Exchange
from medusa_heads.inference.engine.recurrent import graph_sizes
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.machine.measurements import Measurements, as_seconds
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel

_SECONDS, _SAVED = 30.0, 0.25  # what is taken for granted of a target that was never compiled here
_LEAST_SAVED = 0.03  # a share of a step's seconds that is not worth a graph
# The same where the drafter chooses among many sizes, of which a compiled one has two.
_LEAST_SAVED_OF_SIZES = 0.15
_ROUNDS = 5  # in which both views are timed in turns
_KIND = "graphs"


class LateCompiling:
    """The compiled view of a target, made when it pays.

    Args:
        target: the target, uncompiled.
        compiled: makes the compiled view.
        drafter: makes the drafter for either view.

    Attributes:
        seconds: that compiling takes here.
        saved: the share of a step's seconds that it saves.
    """

    def __init__(
        self,
        target: TargetModel,
        compiled: Callable[[], CompiledTarget],
        drafter: Callable[[TargetModel], Drafter],
    ) -> None:
        self._target, self._make, self._make_drafter = target, compiled, drafter
        self._pair: tuple[CompiledTarget, Drafter] | None = None
        self._drafts_like: Drafter | None = None  # the uncompiled view's drafter of that time
        # Rows and slots are a graph each: seconds that were spent decoding such texts without it.
        self._spent: dict[tuple[int, int], float] = defaultdict(float)
        self._compiled: set[tuple[int, int]] = set()
        self.seconds, self.saved = _SECONDS, _SAVED
        known = Measurements().read(_KIND, target_facts(target)) or {}
        try:
            seconds, saved = as_seconds(known["seconds"]), 1.0 - as_seconds(known["share"])
        except (KeyError, ValueError):
            return  # nothing there, or damaged
        self.seconds, self.saved = seconds, saved

    def of_text(self, drafter: Drafter) -> Exchange:
        """For one text, which this drafter drafts for until then."""
        return _OfText(self, drafter)

    def due(self, graph: tuple[int, int], seconds: float, drafter: Drafter) -> bool:
        """Whether texts of this graph are decoded with it, or pay for it, after so many more
        seconds without, in which this drafter drafted."""
        self._spent[graph] += seconds
        if not self._pays(drafter):
            return False
        return graph in self._compiled or self._spent[graph] * self.saved >= self.seconds

    def view(
        self, state: DecodingState, slots: int, drafter: Drafter
    ) -> tuple[CompiledTarget, Drafter] | None:
        """The compiled view with a graph for this text, and a drafter for it that drafts as this
        one does; None where it saves nothing."""
        if self._pair is None or self._drafts_like is not drafter:
            compiled = self._make() if self._pair is None else self._pair[0]
            self._pair = compiled, self._make_drafter(compiled)
            self._drafts_like = drafter
        graph = _graph(state, slots)
        if graph not in self._compiled:
            with self._pair[0].capture_hidden():  # as texts are read, or it is another graph
                is_known = self._compile(*self._pair, state, slots)
            if not is_known:
                self._spent[graph] = 0.0
                return None
            self._compiled.add(graph)
        return self._pair if self._pays(drafter) else None

    def _pays(self, drafter: Drafter) -> bool:
        chooses = isinstance(drafter, BlendedDrafter) and not drafter.padded
        return self.saved >= (_LEAST_SAVED_OF_SIZES if chooses else _LEAST_SAVED)

    def _compile(
        self, compiled: CompiledTarget, drafter: Drafter, state: DecodingState, slots: int
    ) -> bool:
        """Make the graph for texts like this one, and measure what it takes and saves; False where
        there is no memory for that, which says nothing of later."""
        chain = RandomChain(drafter.num_nodes - 1, compiled.vocab_size)
        context = max(state.lengths)
        state.cache.set_length(context)
        try:
            benches = [
                StepBench(view, context, len(state.rows), (state.cache, slots))
                for view in (compiled, self._target)
            ]
            seconds = benches[0].time(chain).step
            if not state.cache.can_go_back:  # what a tree has in front of it is another graph
                longest = graph_sizes(drafter, len(state.rows))[-1]
                seconds += benches[0].time(RandomChain(longest - 1, compiled.vocab_size)).step
        except (RuntimeError, UnsupportedArchitecture) as error:
            from torch._dynamo.exc import TorchDynamoException  # heavy to import

            # There may be no compiler here, or one that gives up, or too little memory for a second
            # cache. Other mistakes are ours.
            usual = TorchDynamoException, UnsupportedArchitecture, torch.OutOfMemoryError
            if not isinstance(error, usual):
                raise
            warn(f"decoding goes on without torch.compile, which failed: {first_line(error)}")
            if isinstance(error, torch.OutOfMemoryError):
                return False
            self.saved = -math.inf
            return True
        if not compiled.compiles:  # no compiler works here, as was said
            self.saved = -math.inf
            return True
        benches[1].time(chain)
        times = [[bench.time(chain).step for bench in benches] for _ in range(_ROUNDS)]
        share = median(new / old for new, old in times)
        self.seconds, self.saved = seconds, 1.0 - share
        kept = {"seconds": seconds, "share": share}
        Measurements().write(_KIND, target_facts(self._target), kept)
        return True


class _OfText(Exchange):
    def __init__(self, compiling: LateCompiling, drafter: Drafter) -> None:
        self._compiling, self._drafter = compiling, drafter
        self._asked: float | None = None  # when it was last asked
        self._done = False

    def due(self, state: DecodingState, slots: int) -> bool:
        if self._done:
            return False
        now = time.perf_counter()
        seconds = now - (self._asked or now)
        self._asked = now
        self._done = self._compiling.due(_graph(state, slots), seconds, self._drafter)
        return self._done

    def view(self, state: DecodingState, slots: int) -> tuple[TargetModel, Drafter] | None:
        return self._compiling.view(state, slots, self._drafter)


def _graph(state: DecodingState, slots: int) -> tuple[int, int]:
    """Texts of as many rows, and slots, share a graph."""
    return len(state.rows), CompiledTarget.capacity(slots)
