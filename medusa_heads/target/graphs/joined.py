"""Products of a few tokens with matrices in a recorded program, by another kernel where that is
faster on this GPU; those of the same tokens joined into one.

Layers multiply what they read with matrices of queries, keys and values one by one. Joining these
in memory would take a copy, of a model that is left as it is; the kernel reads them where they lie.

Shapes: N tokens of D inputs each, O outputs of a matrix.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import linear

from medusa_heads.agreement import TOLERANCE, relative_error
from medusa_heads.errors import first_line, warn
from medusa_heads.machine.attention import kernel_facts, replayed
from medusa_heads.machine.kernels import in_triton
from medusa_heads.machine.kernels import operator as torch_operator
from medusa_heads.machine.measurements import Measurements, as_seconds, measurement_folder
from medusa_heads.machine.programs import Program

KIND = "products"
_MOST_TOKENS, _MOST_MATRICES = 64, 3
_HALF = (torch.bfloat16, torch.float16)
_GAIN = 1.03  # times as fast, in graphs that take turns, which differ by less
# Bytes of matrices that take turns, more than a GPU's own memory holds; and of one at most.
_READ = 256 << 20
_MOST_LAYERS = 256  # of small matrices, which a GPU's own memory may hold where they are used, too

_ALIGNED = 16  # bytes: for what lies elsewhere Triton makes another kernel

_known: dict[str, int | None] = {}


def join_products(program: Program) -> None:
    """Let each group of products in it be one, where that is faster."""
    graph = program.operations
    groups = [] if program.reshapes else list(_groups(graph))
    named = (node for node in graph.nodes if node.op == "placeholder")
    given: dict[Any, Tensor] = dict(zip(named, program.given, strict=True))
    asked: dict[str, int | None] = {}
    for group in groups:
        tokens: Any = group[0].args[0]
        x, matrices = tokens.meta["like"], [given[node.args[1]] for node in group]
        count, outputs = x.shape[:-1].numel(), list(map(len, matrices))
        sizes = matrices[0].device, x.dtype, count, x.shape[-1], outputs
        if (key := str(sizes)) not in asked:
            asked[key] = fastest(*sizes)
        which = asked[key]
        if which is not None and _starts(x.shape, matrices, which):
            _join(graph, group, which)


def _starts(shape: Sequence[int], matrices: Sequence[Tensor], which: int) -> bool:
    """Whether the kernel can be started, which loads it: that cannot be done while a graph is
    recorded, and another process may have measured it, or other matrices lay otherwise."""
    try:
        joined_products(matrices[0].new_zeros(shape), matrices, which)
    except Exception as error:  # as in `fastest`
        _one_by_one(error)
        return False
    return True


def _one_by_one(error: Exception) -> None:
    warn(f"products go on one by one: {first_line(error)}", above=2)


def _groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Products of one input, with one matrix or several, between which nothing is written that was
    there before."""
    waiting: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.meta.get("writes"):
            yield from waiting.values()
            waiting = {}
        elif _is_product(node):
            group = waiting.setdefault(node.args[0], [])
            group.append(node)
            if len(group) == _MOST_MATRICES:
                yield waiting.pop(node.args[0])
    yield from waiting.values()


def _is_product(node: fx.Node) -> bool:
    """Of few tokens with a matrix that lies there for good, without a bias."""
    if node.target is not torch.ops.aten.linear.default or any(node.args[2:]) or node.kwargs:
        return False
    tokens, matrix = node.args
    if not isinstance(tokens, fx.Node) or not isinstance(matrix, fx.Node):
        return False
    x, weight = tokens.meta.get("like"), matrix.meta.get("like")
    if matrix.op != "placeholder" or x is None or weight is None or len(x.shape) < 2:
        return False
    in_order = weight.stride == (weight.shape[1], 1) and x.stride[-1] == 1
    few = x.shape[:-1].numel() <= _MOST_TOKENS and weight.nbytes < _READ
    return bool(in_order and few and weight.dtype in _HALF and x.dtype == weight.dtype)


def _join(graph: fx.Graph, group: Sequence[fx.Node], which: int) -> None:
    tokens, matrices = group[0].args[0], [node.args[1] for node in group]
    with graph.inserting_before(group[0]):
        joined = graph.call_function(joined_products, (tokens, matrices, which))
        joined.meta["reads"] = frozenset().union(*(node.meta["reads"] for node in group))
        for place, node in enumerate(group):
            result = graph.call_function(operator.getitem, (joined, place))
            result.meta["like"] = node.meta["like"]
            node.replace_all_uses_with(result)
    for node in group:
        graph.erase_node(node)


def fastest(
    device: torch.device, dtype: torch.dtype, tokens: int, inputs: int, outputs: Sequence[int]
) -> int | None:
    """By which of the kernel's BLOCKS products with such matrices [O, D] are faster together than
    one by one, and the same; None: by none. Measured once for the same GPU and sizes, where there
    is memory."""
    if device.type != "cuda":
        return None
    sizes = {"tokens": tokens, "inputs": inputs, "outputs": list(outputs)}
    facts: dict[str, Any] = {"device": str(device), "dtype": str(dtype), **sizes}
    key = f"{measurement_folder()} {facts}"
    if key not in _known:
        try:
            seconds = _seconds(device, dtype, tokens, inputs, outputs, facts)
        except torch.OutOfMemoryError as error:  # which says nothing of later
            _one_by_one(error)
            return None
        except Exception as error:  # no compiler for this GPU, or none at all: each has its own
            _one_by_one(error)
            seconds = {"one by one": 0.0}
        alone = seconds.pop("one by one")
        best = min(seconds, key=seconds.__getitem__, default=None)
        pays = best is not None and alone >= _GAIN * seconds[best]
        _known[key] = int(best) if best is not None and pays else None
    return _known[key]


def _seconds(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    inputs: int,
    outputs: Sequence[int],
    facts: dict[str, Any],
) -> dict[str, float]:
    """Of products one by one, and by those of the kernel's BLOCKS that can be; kept for those that
    come later."""
    from medusa_heads.target.graphs import triton_products

    possible = [
        which
        for which, blocks in enumerate(triton_products.BLOCKS)
        if not inputs % blocks.inputs and not any(size % blocks.outputs for size in outputs)
    ]
    if not possible:
        return {"one by one": 0.0}
    store, facts = Measurements(), {**facts, **kernel_facts(device, triton_products)}
    try:
        kept: Any = store.read(KIND, facts)
        # Of what else stands there no kernel knows.
        names = ["one by one", *(str(which) for which in possible if str(which) in kept)]
        return {name: as_seconds(kept[name]) for name in names}
    except (KeyError, TypeError, ValueError):
        pass
    random = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device, dtype=dtype)

    x_ND, of_one = numbers(tokens, inputs), sum(outputs) * inputs * dtype.itemsize
    count = min(1 + _READ // of_one, _MOST_LAYERS)
    layers = [[numbers(size, inputs) for size in outputs] for _ in range(count)]
    expected = torch.cat([linear(x_ND, matrix) for matrix in layers[0]], dim=1).float()

    def alone(*matrices: Tensor) -> object:
        return [linear(x_ND, matrix) for matrix in matrices]

    rivals: dict[str, Callable[..., object]] = {"one by one": alone}
    for which in possible:

        def together(*matrices: Tensor, which: int = which) -> object:
            return joined_products(x_ND, matrices, which)

        try:
            got = torch.cat(joined_products(x_ND, layers[0], which), dim=1).float()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # too large for this GPU, which each compiler says in its own way
            continue
        if relative_error(got, expected) <= TOLERANCE[True]:
            rivals[str(which)] = together
    measured = dict(zip(rivals, replayed(list(rivals.values()), layers), strict=True))
    store.write(KIND, facts, measured)
    return measured


def _products(x: Tensor, matrices: Sequence[Tensor], which: int) -> list[Tensor]:
    x_ND = x.flatten(0, -2).contiguous()
    if x_ND.data_ptr() % _ALIGNED:
        x_ND = x_ND.clone()
    made = in_triton("target.graphs.triton_products.products")(x_ND, matrices, which)
    return [
        each.view(*x.shape[:-1], len(matrix)) for each, matrix in zip(made, matrices, strict=True)
    ]


def _like(x: Tensor, matrices: Sequence[Tensor], _: int) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], len(matrix)) for matrix in matrices]


joined_products: Any = torch_operator(
    "joined_products(Tensor x, Tensor[] matrices, int which) -> Tensor[]",
    _products,
    _like,
    ("CPU", "CUDA"),  # on a CPU Triton interprets its kernels, where it is told to
)
