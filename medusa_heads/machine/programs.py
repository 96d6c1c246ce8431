"""What a function did on tensors, as operations that can be done again; and the same with the small
ones between products compiled.

Layers of a model do the same, one behind the other, on other tensors. So little is compiled, and in
seconds, where a compiler that is given the whole takes half a minute.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from medusa_heads.agreement import TOLERANCE, is_half
from medusa_heads.machine.watched import Watched

_NEARLY = 0.9  # of whole numbers, for two results to be the same
_LEAST = 24  # kernels less, for which it is worth to compile something
# Which a compiler makes one kernel of, where they stand side by side.
_SMALL = frozenset(
    (
        *("add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "neg", "abs", "pow"),
        *("square", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "sin", "cos"),
        *("tanh", "sigmoid", "silu", "gelu", "relu", "rms_norm", "log_softmax", "softmax"),
        *("_log_softmax", "_softmax", "mean", "sum", "amax", "amin", "max", "min", "argmax"),
        *("maximum", "minimum", "clamp", "clamp_min", "clamp_max", "cumsum", "any", "all"),
        *("eq", "ne", "lt", "le", "gt", "ge", "__and__", "__or__", "bitwise_and", "bitwise_or"),
        *("bitwise_not", "logical_and", "logical_or", "logical_not", "isnan", "nan_to_num"),
        *("where", "masked_fill", "cat", "stack", "clone", "to", "_to_copy", "roll", "repeat"),
        *("gather", "index", "index_select", "embedding", "scatter", "topk", "sort", "argsort"),
        *("searchsorted", "arange", "zeros", "ones", "full", "zeros_like", "ones_like"),
        *("full_like", "new_zeros", "new_full", "eye", "tril", "triu"),
    )
)
# Which start nothing on a device, or what copies nothing where its numbers lie in order.
_VIEWS = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "contiguous", "expand"),
        *("transpose", "permute", "unsqueeze", "squeeze", "slice", "select", "narrow", "t"),
        *("alias", "detach", "split", "split_with_sizes", "chunk", "unbind"),
    )
)


class Program:
    """What `traced` saw.

    Attributes:
        held, written: as those of Watched.
    """

    def __init__(self, graph: fx.Graph, given: Sequence[Tensor], watched: Watched) -> None:
        self._graph, self._given = graph, list(given)
        self.held, self.written = watched.held, watched.written

    def __call__(self) -> list[Tensor]:
        """Do it again; what the function returned, flat."""
        results: list[Tensor] = fx.Interpreter(nn.Module(), graph=self._graph).run(*self._given)
        return results

    def compiled(
        self,
        compile: Callable[[fx.GraphModule, Any], Any],
        known: dict[str, Callable[..., Any]] | None = None,
    ) -> Program:
        """The same, where what stands between products, and comes again and again, is compiled;
        each such part has been found to say what it said.

        Args:
            compile: makes a function of such a part and of what it might be given: a backend of
                torch.compile.
            known: what has been compiled before, by `Stretch.key`; what is new comes to it.

        Raises:
            ArithmeticError: a part says something else when it is compiled. Whatever the compiler
                raises is raised as well.
        """
        parts = list(_parts(self._graph))
        fewer = Counter[str]()
        for part in parts:
            if isinstance(part, Stretch):
                fewer[part.key] += part.kernels - 1
        known = {} if known is None else known
        graph, found = fx.Graph(), dict[fx.Node, fx.Node]()
        for part in parts:
            if isinstance(part, fx.Node):
                found[part] = graph.node_copy(part, found.__getitem__)
            elif fewer[part.key] < _LEAST:
                for node in part.nodes:
                    found[node] = graph.node_copy(node, found.__getitem__)
            else:
                if part.key not in known:
                    known[part.key] = part.compiled(compile)
                made = graph.call_function(known[part.key], tuple(found[n] for n in part.given))
                for place, node in enumerate(part.results):
                    found[node] = graph.call_function(operator.getitem, (made, place))
        program = Program(graph, self._given, Watched())
        program.held, program.written = self.held, self.written
        return program


def traced(function: Callable[[], Any]) -> Program:
    """Call a function, and note what it does to tensors: all else that it does is not done again.
    Raises RuntimeError: it asks the host, which broke it off."""
    noting = _Noting()
    with noting:
        results = function()
    return noting.program([leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)])


class _Noting(Watched):
    def __init__(self) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._known = WeakIdKeyDictionary()
        self._given: list[Tensor] = []
        self._last_given: fx.Node | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Before it is done, or what is written to in place might count as made here.
        given, named = tree_map_only(Tensor, self._node, (args, kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        node = self._graph.call_function(func, given, named)
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
            self._note(tensor, node)
        node = self._known[tensor]
        assert isinstance(node, fx.Node)
        return node

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["like"] = _like(tensor)
        if tensor not in self._known:  # or it was written to in place
            self._known[tensor] = node

    def program(self, results: Sequence[Tensor]) -> Program:
        self._graph.output([self._node(tensor) for tensor in results])
        return Program(self._graph, self._given, self)


class _Like(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def example(self) -> Tensor:
        """A tensor of this kind; of whole numbers, zeros: as indices they are always right."""
        once = [size if step else 1 for size, step in zip(self.shape, self.stride, strict=True)]
        made = torch.empty_strided(once, self.stride, dtype=self.dtype, device=self.device)
        made = made.normal_() if self.dtype.is_floating_point else made.zero_()
        return made.expand(self.shape)


def _like(tensor: Tensor) -> _Like:
    return _Like(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class Stretch:
    """Small operations side by side.

    Attributes:
        nodes: these, in order.
        given: what they take from elsewhere.
        results: what others take of them.
        key: the same for those that do the same on other tensors.
        kernels: how many it starts as it is.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes, own = list(nodes), set(nodes)
        self.given = list(
            dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own)
        )
        self.results = [node for node in nodes if not own.issuperset(node.users)]
        self.kernels = sum(not _is_view(node) for node in nodes)
        names: dict[fx.Node, str] = {n: f"given {i}" for i, n in enumerate(self.given)}
        names |= {node: f"own {i}" for i, node in enumerate(self.nodes)}
        told = [
            fx.map_arg((node.args, tuple(sorted(node.kwargs.items()))), names.__getitem__)
            for node in nodes
        ]
        self.key = repr(
            (
                [str(node.target) for node in nodes],
                told,
                [n.meta["like"] for n in self.given],
                [names[node] for node in self.results],
            )
        )

    def compiled(self, compile: Callable[[fx.GraphModule, Any], Any]) -> Callable[..., Any]:
        """A function of what is given, that returns the results. Raises ArithmeticError: they are
        others."""
        graph, found = fx.Graph(), dict[fx.Node, fx.Node]()
        for place, given in enumerate(self.given):
            found[given] = graph.placeholder(f"given_{place}")
        for node in self.nodes:
            found[node] = graph.node_copy(node, found.__getitem__)
        graph.output(tuple(found[node] for node in self.results))
        module = fx.GraphModule(nn.Module(), graph)
        with torch.inference_mode(False), torch.no_grad():
            examples = [given.meta["like"].example() for given in self.given]
            made = compile(module, examples)

            def part(*given: Tensor) -> Sequence[Tensor]:  # which has a name, as graphs want it
                results: Sequence[Tensor] = made(*given)
                return results

            both = zip(part(*examples), module(*examples), strict=True)
            if not all(_same(got, expected) for got, expected in both):
                raise ArithmeticError("compiled, small operations say something else")
        return part


def _same(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    steps = zip(got.shape, got.stride(), expected.stride(), strict=True)
    if any(one != other for size, one, other in steps if size > 1):
        return False
    if not got.is_floating_point():  # what is nearly as large may stand in its place
        return not got.numel() or float((got == expected).float().mean()) >= _NEARLY
    difference = (got - expected).where(got != expected, 0.0).float().nan_to_num().norm()
    allowed = TOLERANCE[is_half(got.dtype)] / 10 * expected.float().nan_to_num().norm()
    return bool(difference <= allowed)


def _parts(graph: fx.Graph) -> Iterator[fx.Node | Stretch]:
    """The operations of a program in an order that does the same, small ones in stretches: they
    wait for what needs them, or what writes where they might read."""
    waiting: dict[fx.Node, None] = {}
    for node in graph.nodes:
        waits = not waiting.keys().isdisjoint(node.all_input_nodes)
        if _is_small(node) or (waits and _is_view(node)):
            waiting[node] = None
            continue
        if waiting and (waits or _writes(node)):
            yield from _stretch(waiting)
            waiting = {}
        yield node


def _stretch(waiting: Mapping[fx.Node, None]) -> Iterator[Stretch]:
    stretch = Stretch(list(waiting))
    if stretch.results:
        yield stretch


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    namespace, _, name = str(packet).partition(".")
    return name if namespace == "aten" else ""


def _is_small(node: fx.Node) -> bool:
    if _name(node) not in _SMALL or _writes(node) or not isinstance(node.meta.get("like"), _Like):
        return False
    given = [n.meta.get("like") for n in node.all_input_nodes]
    return None not in given and len({like.device for like in (node.meta["like"], *given)}) == 1


def _is_view(node: fx.Node) -> bool:
    return _name(node) in _VIEWS or node.target is operator.getitem


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
