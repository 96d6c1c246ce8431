"""A target whose verification is compiled: fixed shapes, one graph, no recompilation as text grows.

Every forward of a tree sees the same number of nodes, the whole cache (of a fixed capacity) and an
explicit mask over it. What changes from step to step is the content of tensors alone, so that the
graph compiled in the first step serves all others; on a GPU it is replayed as a CUDA graph.

Shapes: B batch, N tree nodes, C capacity in slots, H key-value heads, X head dimension.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from medusa_heads.agreement import TOLERANCE, is_half, relative_error
from medusa_heads.errors import UnsupportedArchitecture, first_line, warn
from medusa_heads.machine.attention import ask_again
from medusa_heads.machine.devices import nothing_collected
from medusa_heads.machine.graphs import NotingBackend, look, many_graphs, no_graph, noted
from medusa_heads.target.attention import TreeMask, compiled_tree_attention
from medusa_heads.target.cache import RowCache
from medusa_heads.target.features import Captured, Read, check_layers, held, watch
from medusa_heads.target.graphs.kept_caches import KeptCaches
from medusa_heads.target.graphs.static_cache import (
    StaticRecurrentCache,
    StaticRowCache,
    explicit_inputs,
    given_to,
)
from medusa_heads.target.graphs.text_lock import OwnedLock
from medusa_heads.target.recurrent import is_recurrent
from medusa_heads.target.scans import has_scans
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Made = TypeVar("Made")

_CAPACITY_STEP = 512  # capacities are rounded up, so that few of them, and few graphs, exist


class CompiledTarget(TargetModel):
    """A target that verifies trees through torch.compile. The model is not modified, but has
    forward hooks on its lm_head and on the layers of its features as long as this object lives.
    Raises UnsupportedArchitecture: at the first verification, if the model's forward is not one
    graph.

    Attributes:
        whole_steps: whether steps of decoding are graphs as a whole, where they can be.
    """

    one_shape = True  # another size of trees is another graph, which takes long to make
    _stacked = False  # the rows of many layers in one tensor
    _hooked = True  # for all texts: hooks of each would invalidate the graph
    _captured_kind: type[Captured] = Captured
    _is_full = False  # torch makes no more graphs, and this text has none

    def __init__(
        self,
        model: PreTrainedModel,
        backend: str | Callable[..., Any] = "inductor",
        features: tuple[int, ...] = (),
        whole_steps: bool = False,
    ) -> None:
        super().__init__(model)
        check_layers(model, features)
        self.features, self._backend, self.whole_steps = features, backend, whole_steps
        self._on_gpu = self.device.type == "cuda"
        self._views: dict[tuple[tuple[int, ...], bool], CompiledTarget] = {}
        self._caches = KeptCaches()
        self._compared: set[tuple[int | None, ...]] = set()  # graphs: rows, tokens, capacity
        self._captured = self._captured_kind()
        self.lock = OwnedLock()  # of whoever decodes: one text at a time has its cache
        # Within a text, what has been read before: through which graphs.
        self._calls: dict[Any, Callable[[list[Tensor]], list[Tensor]]] | None = None
        for hook in self._hooks() if self._hooked else ():
            weakref.finalize(self, hook.remove)
        self._forward = self._compiled = self.in_one_graph(self.model.forward)

    def _hooks(self) -> list[Any]:
        hook = self.get_output_embeddings().register_forward_pre_hook
        return [*watch(self.model, self.features, self._captured.keep), hook(self._captured.take)]

    def in_one_graph(self, function: Callable[..., Made]) -> Callable[..., Made]:
        """The function, compiled; to be called by `run`."""
        backend = NotingBackend(self._backend, "reduce-overhead" if self._on_gpu else None)
        return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)

    def begin_step(self) -> None:
        """What graphs of the step before put out is not looked at any more."""
        if self._on_gpu:
            torch.compiler.cudagraph_mark_step_begin()

    def run(self, compiled: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
        """Call what `in_one_graph` made; where no compiler works here, the function as it is, from
        then on, and where torch keeps too many graphs already, until the text has ended. Raises
        UnsupportedArchitecture: it is not one graph."""
        self.begin_step()
        told = torch._dynamo.exc
        with nothing_collected(), compiled_tree_attention():
            try:
                made: Made = many_graphs()(compiled)(*args, **kwargs)
            except no_graph() as error:
                reason = " ".join(str(error).split())[:160]
                whole = "" if compiled is self._compiled else "a step of "
                raise UnsupportedArchitecture(
                    f"{whole}{self.config.model_type} cannot be compiled in one graph ({reason})",
                    "leave compile out",
                ) from error
            except (told.BackendCompilerFailed, told.FailOnRecompileLimitHit) as error:
                # Before anything was computed. Graphs of all models of the process are too many.
                self._is_full = isinstance(error, told.FailOnRecompileLimitHit)
                self._forward = self.model.forward
                failed = "it keeps too many graphs" if self._is_full else first_line(error)
                warn(f"decoding goes on without torch.compile, which failed: {failed}")
                plain: Any = compiled
                made = plain.__wrapped__(*args, **kwargs)
        return made

    @property
    def loses_states(self) -> bool:
        """Whether no graph carries the model's states on."""
        return has_scans(self.model) or self.keeps_states_alone

    @property
    def reads_lm_head(self) -> bool:
        """Whether the model's lm_head is the module that has our hook."""
        lm_head = self.get_output_embeddings()
        hooks = getattr(lm_head, "base_layer", lm_head)._forward_pre_hooks.values()  # as of peft's
        return not self._hooked or self._captured.take in hooks

    @property
    def compiles(self) -> bool:
        """False within `uncompiled`, and where no compiler works."""
        return self._forward is self._compiled

    def _view(self, features: tuple[int, ...], packs: bool | None = None) -> CompiledTarget:
        packs = self.packs if packs is None else packs
        if (view := self._views.get((features, packs))) is None:
            view = self._like(features)
            view.packs = packs
            self._views[features, packs] = view
        return view

    def _like(self, features: tuple[int, ...]) -> CompiledTarget:
        return CompiledTarget(self.model, self._backend, features, self.whole_steps)

    def without_packed(self) -> CompiledTarget:
        return self._view(self.features, packs=False) if self.packs else self

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Within the block, the same forward with the same masks and cache, without the graph."""
        before, self._forward = self._forward, self.model.forward
        try:
            yield
        finally:
            self._forward = before

    @contextmanager
    def capture_hidden(self) -> Iterator[Callable[[], Tensor]]:
        """See TargetModel; a text begins."""
        ask_again()
        captured = self._captured

        def wide() -> Tensor:
            read = Read.of(held(captured.hidden), self.features, captured.outputs)
            # A copy: a replayed CUDA graph writes the next step's where these lie, and drafters may
            # read those of several steps at once.
            return read.wide() if self.features else read.hidden_BTD.clone()

        wanted, captured.wanted, self._calls = captured.wanted, True, {}
        try:
            yield wide
        finally:
            if self._is_full:  # texts of other shapes have their graphs
                self._forward, self._is_full = self._compiled, False
            captured.wanted, self._calls = wanted, None
            captured.clear()

    @staticmethod
    def capacity(slots: int) -> int:
        """The slots of the cache, and of the graph, that serve texts of so many."""
        return -(-max(slots, 1) // _CAPACITY_STEP) * _CAPACITY_STEP

    def new_cache(self, batch_size: int = 1, slots: int = 0) -> RowCache:
        """An empty cache with room for `slots`; kept and used again, since the graph knows it."""
        super().new_cache()  # refuses what no cache is for
        capacity = self.capacity(slots)
        of_kind = StaticRecurrentCache if is_recurrent(self.config) else StaticRowCache
        make = partial(of_kind, self.config, capacity, stacked=self._stacked)
        return self._caches.take((batch_size, capacity, self.dtype, self.device), make)

    def read(
        self, tokens_BN: Tensor, cache: RowCache, mask: TreeMask, last: int | None = None
    ) -> Tensor:
        """As TargetModel.read, through the graph."""
        assert isinstance(cache, StaticRowCache)
        graph = (*tokens_BN.shape, cache.fixed_capacity)
        if (
            self.compiles
            and isinstance(cache, StaticRecurrentCache)
            and graph not in self._compared
        ):
            logits_BNV = self._compare(tokens_BN, cache, mask)
            self._compared.add(graph)
        else:
            logits_BNV = self._run(tokens_BN, cache, mask)
        return logits_BNV if last is None else logits_BNV[:, -last:]

    def _compare(self, tokens_BN: Tensor, cache: StaticRecurrentCache, mask: TreeMask) -> Tensor:
        """The same, once without the graph before: there is more in these layers that a compiler
        may take for something else, and what it does to a state nobody sees at once."""
        cache.hold()
        with self.uncompiled():
            expected_BNV = self._run(tokens_BN, cache, mask).flatten(0, 1).float()
        cache.put_back()
        logits_BNV = self._run(tokens_BN, cache, mask)
        error = relative_error(logits_BNV.flatten(0, 1).float(), expected_BNV)
        if error > TOLERANCE[is_half(self.dtype)]:
            raise UnsupportedArchitecture(
                f"the logits of {self.config.model_type} differ by {error:.2g} standard deviations "
                "where it is compiled",
                "leave compile out",
            )
        return logits_BNV

    def _run(self, tokens_BN: Tensor, cache: StaticRowCache, mask: TreeMask) -> Tensor:
        if self.loses_states:
            raise UnsupportedArchitecture(
                f"{self.config.model_type} is a Mamba, whose state is not carried through a graph",
                "leave compile out",
            )
        nodes, first = tokens_BN.shape[1], mask.first_on_host
        inputs = explicit_inputs(self, tokens_BN, cache, mask)
        with cache.tree_slots(first, nodes, tokens_BN.device):
            if self._calls is None or not self.compiles:
                self.looks = False
                return self._checked(inputs)
            return self._run_within_text(self._calls, inputs)

    def _checked(self, inputs: dict[str, Any]) -> Tensor:
        """The logits, through a graph that is looked for by all that it was made for."""
        with self.packed_for(inputs["input_ids"].numel()):
            logits_BNV: Tensor = self.run(self._forward, **inputs).logits
        return logits_BNV

    def _run_within_text(self, calls: dict[Any, Any], inputs: dict[str, Any]) -> Tensor:
        captured, given = self._captured, given_to(inputs)
        key = inputs[self.cache_argument], *map(look, given)
        call = calls.get(key)
        self.looks = call is None
        if call is not None:
            self.begin_step()
            logits_BNV, *read = call(given)
            captured.put(self.features, read)
            return logits_BNV
        captured.clear()  # or the first graph of a text would be another one than later ones
        logits_BNV, calls[key] = self._first(inputs, given)
        return logits_BNV

    def _first(
        self, inputs: dict[str, Any], given: list[Tensor]
    ) -> tuple[Tensor, Callable[[list[Tensor]], list[Tensor]] | None]:
        """A forward that is the first of its shapes in a text, and what makes the others: of what
        is given, the logits, and what was read besides."""
        with noted() as made:
            logits_BNV = self._checked(inputs)
        if len(made) != 1:
            return logits_BNV, None
        results = [logits_BNV, *self._captured.tensors(self.features)]
        return logits_BNV, made[0].between(given, results)

    def forget_hidden(self) -> None:
        """What was captured last, or is not there: two states that graphs would tell apart."""
        self._captured.clear()

    def read_within(
        self, tokens_BN: Tensor, cache: StaticRowCache, mask: TreeMask
    ) -> tuple[Tensor, Tensor]:
        """As a part of a larger graph, within `capture_hidden` and the cache's `tree_slots`: logits
        [B, N, V], and hidden states [B, N, X] as `capture_hidden` gives them."""
        logits_BNV: Tensor = self.model(**explicit_inputs(self, tokens_BN, cache, mask)).logits
        captured = self._captured
        hidden_BNX = Read.of(captured.hidden[0], self.features, captured.outputs).wide()
        captured.clear()  # or the graph would put them out
        return logits_BNV, hidden_BNX
