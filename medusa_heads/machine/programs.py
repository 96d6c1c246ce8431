"""What a function did on tensors, as operations that can be done again; and the same with the small
ones between products compiled.

Layers of a model do the same, one behind the other, on other tensors. So little is compiled, and in
seconds, where a compiler that is given the whole takes half a minute.
"""

from __future__ import annotations

import copy
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

_LEAST = 2  # kernels less, for which it is worth to compile something
_STREAM = -1  # no address


class Program:
    """What `traced` saw.

    Attributes:
        operations: what is done, in order.
        given: the tensors that were there before.
        held, written: as those of Watched.
        reshapes: whether a tensor got another shape in place, of which no part is compiled.
    """

    def __init__(
        self, graph: fx.Graph, given: Sequence[Tensor], watched: Watched | Program
    ) -> None:
        self.operations, self.given = graph, list(given)
        self.held: dict[int, Any] = watched.held
        self.written: dict[int, torch.dtype] = watched.written
        self.reshapes = False

    def __call__(self) -> list[Tensor]:
        """Do it again; what the function returned, flat."""
        return fx.Interpreter(nn.Module(), graph=self.operations).run(*self.given)

    def compiled(
        self,
        compile: Callable[[fx.GraphModule, Any], Any],
        known: dict[str, Callable[..., Any] | None] | None = None,
    ) -> Program:
        """The same, where what stands between products, and comes again and again, is compiled;
        each such part has been found to say what it said. Raises Exception: what the compiler
        raised, where it made nothing.

        Args:
            compile: makes a function of such a part and of what it might be given: a backend of
                torch.compile.
            known: what has been compiled before, by `Stretch.key`, or stays as it is (None); what
                is new comes to it.
        """
        parts = [] if self.reshapes else list(parts_of(self.operations))
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
        return Program(graph, self.given, self)

    def graph(self) -> Any:
        """The same as torch's interpreter knows it, and what it is given, of which other tensors
        may take the places. Does it once more. Raises RuntimeError: it does not know an
        operation."""
        program = fx.Interpreter(nn.Module(), graph=self.operations)
        names = [f"given_{place}" for place in range(len(self.given))]
        # As torch.jit.trace does, which keeps each function that it makes for good.
        graph = torch._C._create_graph_by_tracing(
            lambda *given: tuple(program.run(*given)),
            tuple(self.given),
            *(lambda _: "", True, False, None, names),
        )[0]
        torch._C._jit_pass_erase_shape_information(graph)
        # Numbered one by one, as graphs of other sizes are.
        return torch._C._jit_pass_canonicalize(graph), list(self.given)


class Script:
    """What a function does, as operations that torch's interpreter calls one by one, not Python's.
    Raises RuntimeError: the interpreter does not know an operation.

    Args:
        program: the function's, which is done once more.
        given: those of the program's tensors that are others at each call.
        size: of what is given.

    Attributes:
        size: the one that it serves; None for all.
    """

    def __init__(self, program: Program, given: Sequence[Tensor], size: int) -> None:
        self._graph, self._inputs = program.graph()
        self._places = [[i for i, each in enumerate(self._inputs) if each is one] for one in given]
        self.size: int | None = size
        self._make(self._graph.copy())

    def _make(self, graph: Any) -> None:
        self._function = torch._C._create_function_from_graph("script", graph)

    def with_other(self, other: Script) -> Script:
        """The same for all sizes, as far as another one of the same function, for another size,
        says how. Raises RuntimeError: it does not."""
        assert self.size is not None and other.size is not None
        pairs = enumerate(zip(self._inputs, other._inputs, strict=False))
        differs = {place for place, (one, another) in pairs if one is not another}
        known = {place for where in self._places for place in where}
        if self._places != other._places or not differs <= known:
            raise RuntimeError("it reads other memory where it is given more")
        made, graph = copy.copy(self), self._graph.copy()
        _let_grow(graph, self.size, other._graph, other.size)
        made.size = None
        made._make(graph)
        return made

    def __call__(self, given: Sequence[Tensor], size: int) -> list[Tensor]:
        """What the function returns of these in place of what was given, of this size."""
        inputs = self._inputs
        for where, each in zip(self._places, given, strict=True):
            for place in where:
                inputs[place] = each
        # As they are: nothing is fused, and so nothing rounded in another way.
        before = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        try:
            numbers = (size,) if self.size is None else ()
            return list(self._function(*inputs, *numbers))
        finally:
            torch._C._set_graph_executor_optimize(before)


def _let_grow(graph: Any, size: int, other: Any, other_size: int) -> None:
    """Make the numbers in a graph that differ from those in the graph of another size what they are
    for whatever size a further input says. Raises RuntimeError: more differs."""
    nodes, others = list(graph.nodes()), list(other.nodes())
    numbers = []
    for node, like in zip(nodes, others, strict=False):
        if _said(node) != _said(like):
            if not _is_number(node) or not _is_number(like):
                raise RuntimeError("it does something else where it is given more")
            numbers.append((node, node.i("value"), like.i("value")))
    if len(nodes) != len(others):
        raise RuntimeError("it does something else where it is given more")
    number = graph.addInput("size")
    number.setType(torch._C.IntType.get())
    growing: dict[tuple[int, int], Any] = {(1, 0): number}
    graph.setInsertPoint(nodes[0])
    for node, here, there in numbers:
        slope, rest = divmod(here - there, size - other_size)
        offset = here - slope * size
        if rest:
            raise RuntimeError("a number does not grow with the size")
        if (slope, offset) not in growing:
            value = number
            for operation, by in (("aten::mul", slope), ("aten::add", offset)):
                made = graph.create(operation, [value, graph.insertConstant(by)])
                made.output().setType(torch._C.IntType.get())
                value = graph.insertNode(made).output()
            growing[slope, offset] = value
        node.output().replaceAllUsesWith(growing[slope, offset])


def _said(node: Any) -> str:
    return str(node).partition("#")[0]  # without the line of Python that it comes from


def _is_number(node: Any) -> bool:
    whole = node.kind() == "prim::Constant" and node.hasAttribute("value")
    return bool(whole and node.kindOf("value") == "i")


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
