"""Calls of a graph that are made again without asking whether it still serves.

Before each call torch.compile looks at all that a graph was made for: every module and weight of
the model, and every number that it took for a constant. It takes a millisecond of the host where a
model has six layers, and grows with them. Within a text none of it changes. So the first call of a
text is made that way, and others of its shapes go to the graph itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medusa_heads.machine.attention import seen_words

# Calls of graphs, where someone wants to know of them.
_NOTED: ContextVar[list[Call] | None] = ContextVar("noted", default=None)


class Call:
    """One call of a graph, with tensors as graphs know them: flat, weights among them."""

    def __init__(
        self, graph: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        self._graph, self._inputs, self._outputs = graph, inputs, outputs

    def whole(self) -> Callable[[], object] | None:
        """The same once more; None where the graph puts something out, for somebody to use."""
        return None if self._outputs else lambda: self._graph(*self._inputs)

    def between(
        self, given: Sequence[Tensor], results: Sequence[Any]
    ) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
        """The same with other tensors of these shapes in the places of those that were given, to
        return what then stands in the places of these results. None where some result is not what
        the graph puts out."""
        graph, inputs = self._graph, list(self._inputs)
        # What no graph takes, it does not depend on but for its shape.
        places = [_places(tensor, self._inputs) for tensor in given]
        found = [_places(result, self._outputs) for result in results]
        if not all(found):
            return None

        def call(others: Sequence[Tensor]) -> list[Tensor]:
            for where, other in zip(places, others, strict=True):
                for place in where:
                    inputs[place] = other
            outputs = graph(*inputs)
            return [outputs[where[0]] for where in found]

        return call


def _made_once(module: torch.fx.GraphModule) -> None:
    """The words of a mask, for which every layer asks: to a compiler each may be others."""
    words: dict[Any, torch.fx.Node] = {}
    for node in module.graph.find_nodes(op="call_function", target=seen_words):
        first = words.setdefault(node.args[0], node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
    if words:
        module.recompile()


def _places(wanted: Any, among: Sequence[Any]) -> list[int]:
    return [place for place, other in enumerate(among) if other is wanted]


def look(tensor: Tensor) -> tuple[Any, ...]:
    """What a graph knows of a tensor that is given to it."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_inference()


@contextmanager
def noted() -> Iterator[list[Call]]:
    """Within the block, calls of graphs come into this list."""
    calls: list[Call] = []
    token = _NOTED.set(calls)
    try:
        yield calls
    finally:
        _NOTED.reset(token)


class NotingBackend:
    """A backend of torch.compile, whose graphs' calls can be `noted`.

    Args:
        backend: its name, or itself. Raises InvalidBackend: there is none of this name.
        mode: of torch.compile, for Inductor.
    """

    def __init__(self, backend: str | Callable[..., Any], mode: str | None = None) -> None:
        self._key = backend, mode
        self._inner: Any = backend
        if backend == "inductor":  # as torch.compile takes it
            self._inner = _inductor(mode)
        elif isinstance(backend, str):
            self._inner = torch._dynamo.lookup_backend(backend)
        # By which messages name it, and torch knows its own backends.
        self.__name__ = str(backend if isinstance(backend, str) else _name(backend))

    def __eq__(self, other: object) -> bool:  # targets of one model share graphs
        return isinstance(other, NotingBackend) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self.__name__)

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _made_once(module)
        graph = self._inner(module, inputs)

        def call(*given: Any) -> Any:
            outputs = graph(*given)
            if (calls := _NOTED.get()) is not None:
                calls.append(Call(graph, given, outputs))
            return outputs

        return call

    def reset(self) -> None:
        """As torch.compiler.reset() asks of every backend."""
        if reset := getattr(self._inner, "reset", None):
            reset()


def _inductor(mode: str | None) -> Callable[..., Any]:
    if kind := getattr(torch, "_TorchCompileInductorWrapper", None):  # no name that torch promises
        made: Callable[..., Any] = kind(mode, None, False)
        return made
    options = torch._inductor.list_mode_options(mode or "default")
    known: Any = torch._dynamo.lookup_backend("inductor")
    return partial(known, config_patches=options)


def _name(backend: Any) -> Any:
    return getattr(backend, "__name__", backend)


def many_graphs() -> Any:
    """A decorator: what it runs may be compiled into many graphs."""
    config: Any = torch._dynamo.config  # heavy to import
    # Batch sizes, capacities and tree sizes are graphs of their own, and all wanted; so are those
    # with other hooks, which may belong to heads that are gone.
    settings = {"recompile_limit": 256, "skip_nnmodule_hook_guards": False}
    # Or weights could not be swapped: torch 2.15 lets go of them for backends of its own alone.
    if hasattr(config, "invalidate_compile_context_weakrefs"):
        settings["invalidate_compile_context_weakrefs"] = True
    return config.patch(**settings)


def no_graph() -> tuple[type[Exception], ...]:
    """What is said of a function that is not one graph."""
    told = torch._dynamo.exc  # heavy to import
    return told.Unsupported, told.UserError
