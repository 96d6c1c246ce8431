"""What a function did on tensors, as operations that can be done again; and the same with the small
ones between products compiled.

Layers of a model do the same, one behind the other, on other tensors. So little is compiled, and in
seconds, where a compiler that is given the whole takes half a minute.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from medusa_heads.machine.stretches import Stretch, like_of, parts_of, places_of
from medusa_heads.machine.watched import NothingRead, Watched, tensors_of, written_by

_LEAST = 24  # kernels less, for which it is worth to compile something
_STREAM = -1  # no address


class Program:
    """What `traced` saw.

    Attributes:
        held, written: as those of Watched.
        reshapes: whether a tensor got another shape in place, of which no part is compiled.
    """

    def __init__(
        self, graph: fx.Graph, given: Sequence[Tensor], watched: Watched | Program
    ) -> None:
        self._graph, self._given = graph, list(given)
        self.held: dict[int, Any] = watched.held
        self.written: dict[int, torch.dtype] = watched.written
        self.reshapes = False

    def __call__(self) -> list[Tensor]:
        """Do it again; what the function returned, flat."""
        results: list[Tensor] = fx.Interpreter(nn.Module(), graph=self._graph).run(*self._given)
        return results

    def compiled(
        self,
        compile: Callable[[fx.GraphModule, Any], Any],
        known: dict[str, Callable[..., Any] | None] | None = None,
    ) -> Program:
        """The same, where what stands between products, and comes again and again, is compiled;
        each such part has been found to say what it said.

        Args:
            compile: makes a function of such a part and of what it might be given: a backend of
                torch.compile.
            known: what has been compiled before, by `Stretch.key`, or stays as it is (None); what
                is new comes to it.

        Raises:
            Exception: what the compiler raised, where it made nothing.
        """
        parts = [] if self.reshapes else list(parts_of(self._graph))
        fewer = Counter[str]()
        for part in parts:
            if isinstance(part, Stretch):
                fewer[part.key] += part.kernels - 1
        known = {} if known is None else known
        failed: Exception | None = None
        for part in parts:
            if isinstance(part, Stretch) and fewer[part.key] >= _LEAST and part.key not in known:
                try:
                    known[part.key] = part.compiled(compile)
                except torch.OutOfMemoryError:  # which says nothing of this part
                    raise
                except Exception as error:  # compilers fail in ways of their own
                    known[part.key], failed = None, error
        if failed is not None and not any(known.values()):
            raise failed
        if not parts:
            return self
        graph, found = fx.Graph(), dict[fx.Node, fx.Node]()
        for part in parts:
            if isinstance(part, fx.Node):
                found[part] = graph.node_copy(part, found.__getitem__)
            elif fewer[part.key] < _LEAST or (made := known[part.key]) is None:
                for node in part.nodes:
                    found[node] = graph.node_copy(node, found.__getitem__)
            else:
                call = graph.call_function(made, tuple(found[node] for node in part.given))
                for place, node in enumerate(part.results):
                    found[node] = graph.call_function(operator.getitem, (call, place))
        return Program(graph, self._given, self)


def traced(function: Callable[[], Any]) -> Program:
    """Call a function, and note what it does to tensors: all else that it does is not done again.
    Raises RuntimeError: it asks the host, which broke it off."""
    noting = _Noting()
    with noting, NothingRead():
        results = function()
    return noting.program(list(tensors_of(results)))


class _Noting(Watched):
    def __init__(self) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._known = WeakIdKeyDictionary()
        self._given: list[Tensor] = []
        self._last_given: fx.Node | None = None
        self._reshapes = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Before it is done, or what is written to in place might count as made here.
        given, named = tree_map_only(Tensor, self._node, (args, kwargs))
        # What draws goes on in a stream of random numbers, as in a memory.
        drawn = {_STREAM} if torch.Tag.nondeterministic_seeded in func.tags else set[int]()
        reads, writes = tensors_of((args, kwargs)), written_by(func, args, kwargs)
        memory = {"reads": places_of(reads) | drawn, "writes": places_of(writes) | drawn}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        node = self._graph.call_function(func, given, named)
        node.meta.update(memory)
        if isinstance(result, Tensor):
            self._note(result, node)
        elif isinstance(result, tuple | list):
            for place, each in enumerate(result):
                if isinstance(each, Tensor):
                    self._note(each, self._graph.call_function(operator.getitem, (node, place)))
        return result

    def _node(self, tensor: Tensor) -> fx.Node:
        if tensor not in self._known:
            last = self._last_given
            where = self._graph.inserting_after(last) if last else self._graph.inserting_before()
            with where:
                node = self._graph.placeholder(f"given_{len(self._given)}")
            self._last_given = node
            self._given.append(tensor)
            # Also what came to be without a dispatcher, where something else had been made before.
            storage = tensor.untyped_storage()
            self.held[storage.data_ptr()] = storage
            self._note(tensor, node)
        node = self._known[tensor]
        assert isinstance(node, fx.Node)
        return node

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["like"] = like = like_of(tensor)
        known = self._known.setdefault(tensor, node)  # it may have been written to in place
        self._reshapes |= known.meta["like"] != like

    def program(self, results: Sequence[Tensor]) -> Program:
        self._graph.output([self._node(tensor) for tensor in results])
        program = Program(self._graph, self._given, self)
        program.reshapes = self._reshapes
        return program
