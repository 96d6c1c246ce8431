"""Small operations side by side in a program, to be compiled into one kernel or a few."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from medusa_heads.agreement import TOLERANCE, finite, is_half, same_oddities

_ALIGNED = 16  # bytes, as Inductor has it
_NEARLY = 0.9  # of whole numbers, for two results to be the same
_LARGEST = 1 << 28  # bytes of what a part reads or makes: it is tried on as much
# Which a compiler makes few kernels of where they stand side by side.
_SMALL = frozenset(
    (
        "add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "neg", "abs", "pow",
        "square", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "sin", "cos",
        "tanh", "sigmoid", "silu", "gelu", "relu", "rms_norm", "log_softmax", "softmax",
        "_log_softmax", "_softmax", "mean", "sum", "amax", "amin", "max", "min", "argmax",
        "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "cumsum", "any", "all",
        "eq", "ne", "lt", "le", "gt", "ge", "__and__", "__or__", "bitwise_and", "bitwise_or",
        "bitwise_not", "logical_and", "logical_or", "logical_not", "isnan", "nan_to_num",
        "where", "masked_fill", "cat", "stack", "clone", "to", "_to_copy", "roll", "repeat",
        "gather", "index", "index_select", "embedding", "scatter", "index_copy", "argsort",
        "pad", "searchsorted", "arange", "zeros", "ones", "full", "zeros_like", "ones_like",
        "full_like", "new_zeros", "new_full", "eye", "tril", "triu", "addcmul",
    )
)  # fmt: skip
# Which start nothing on a device, or what copies nothing where its numbers lie in order.
_VIEWS = frozenset(
    (
        "view", "_unsafe_view", "reshape", "flatten", "unflatten", "contiguous", "expand",
        "view_as", "expand_as", "unfold",
        "transpose", "permute", "unsqueeze", "squeeze", "slice", "select", "narrow", "t",
        "alias", "detach", "split", "split_with_sizes", "chunk", "unbind",
    )
)  # fmt: skip


class Like(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aside: int  # numbers behind a place whose address compilers can count on

    @property
    def once(self) -> list[int]:
        """The shape without what is there again and again."""
        return [size if step else 1 for size, step in zip(self.shape, self.stride, strict=True)]

    @property
    def nbytes(self) -> int:
        return prod(self.once) * self.dtype.itemsize

    def example(self) -> Tensor:
        """A tensor of this kind, of random numbers; of whole ones zeros: they may be indices."""
        reach = sum((size - 1) * step for size, step in zip(self.once, self.stride, strict=True))
        room = self.aside + max(reach, 0) + 1
        made = torch.empty(room, dtype=self.dtype, device=self.device)
        # What lies elsewhere than this did, compiled code copies first.
        made = made.as_strided(self.once, self.stride, self.aside)
        # Not from the stream that texts draw from.
        random = torch.Generator(self.device).manual_seed(0)
        if self.dtype.is_floating_point:
            made.normal_(generator=random)
        elif self.dtype == torch.bool:
            made.bernoulli_(generator=random)
        else:
            made.zero_()
        return made.expand(self.shape)


def like_of(tensor: Tensor) -> Like:
    aside = int(tensor.storage_offset()) % (_ALIGNED // tensor.element_size())
    return Like(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, aside)


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
                [n.meta.get("like") for n in (*self.given, *self.nodes)],
                [names[node] for node in self.results],
            )
        )

    def compiled(
        self, compile: Callable[[fx.GraphModule, Any], Any]
    ) -> Callable[..., Sequence[Tensor]] | None:
        """A function of what is given, that returns the results; None where they are others, or
        others of them share memory. Raises what the compiler does."""
        graph, found = fx.Graph(), dict[fx.Node, fx.Node]()
        for place, given in enumerate(self.given):
            found[given] = graph.placeholder(f"given_{place}")
        for node in self.nodes:
            found[node] = graph.node_copy(node, found.__getitem__)
        graph.output(tuple(found[node] for node in self.results))
        module = fx.GraphModule(nn.Module(), graph)
        with torch.inference_mode(False), torch.no_grad():
            examples = [given.meta["like"].example() for given in self.given]
            expected = module(*examples)
            made = compile(module, examples)

            def part(*given: Tensor) -> Sequence[Tensor]:  # which has a name, as graphs want it
                return made(*given)

            got = part(*examples)
        shares = _shares(examples, got) == _shares(examples, expected)
        return part if shares and all(map(_same, got, expected)) else None


def _shares(given: Sequence[Tensor], results: Sequence[Tensor]) -> list[int]:
    """Of each, the first whose memory it has: what is written to one in place is read of both."""
    places = [tensor.untyped_storage().data_ptr() for tensor in (*given, *results)]
    return [places.index(place) for place in places]


def _same(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    steps = zip(got.shape, got.stride(), expected.stride(), strict=True)
    if any(one != other for size, one, other in steps if size > 1):
        return False
    if not got.is_floating_point():  # what is nearly as large may stand in its place
        return not got.numel() or float((got == expected).float().mean()) >= _NEARLY
    if not same_oddities(got, expected):
        return False
    difference, allowed = finite(got - expected).float().norm(), TOLERANCE[is_half(got.dtype)] / 10
    return bool(difference <= allowed * finite(expected).float().norm())


def parts_of(graph: fx.Graph) -> Iterator[fx.Node | Stretch]:
    """The operations of a program in an order that does the same, small ones in stretches: these
    wait for what needs them, and what writes the memory that was there waits behind them, for what
    looks there."""
    waiting: dict[fx.Node, None] = {}
    behind: dict[fx.Node, None] = {}
    written: set[int] = set()  # by what waits behind
    for node in graph.nodes:
        given, reads = node.all_input_nodes, node.meta.get("reads", ())
        if not behind.keys().isdisjoint(given) or not written.isdisjoint(reads):
            yield from _stretch(waiting)
            yield from behind
            waiting, behind, written = {}, {}, set()
        waits = not waiting.keys().isdisjoint(given)
        if _is_small(node) or (waits and _is_view(node)):
            waiting[node] = None
        elif waiting and _writes(node):
            behind[node] = None
            written |= node.meta["writes"]
        else:
            if waits or node.op == "output":
                yield from _stretch(waiting)
                yield from behind
                waiting, behind, written = {}, {}, set()
            yield node


def places_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Where they lie: one address for all that share memory."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors) - {0}


def _stretch(waiting: Mapping[fx.Node, None]) -> Iterator[Stretch]:
    stretch = Stretch(list(waiting))
    if stretch.results:
        yield stretch


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    namespace, _, name = str(packet).partition(".")
    return name if namespace == "aten" else ""


def _is_small(node: fx.Node) -> bool:
    if _name(node) not in _SMALL or _writes(node):
        return False
    made = [node] if "like" in node.meta else list(node.users)  # of several results
    told = [each.meta.get("like") for each in (*node.all_input_nodes, *made)]
    likes = [like for like in told if isinstance(like, Like)]
    if len(likes) < len(told) or max(like.nbytes for like in likes) > _LARGEST:
        return False
    return len({like.device for like in likes}) == 1


def _is_view(node: fx.Node) -> bool:
    return _name(node) in _VIEWS or node.target is operator.getitem


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
