"""Other ways to torch's kernels than the usual ones: products in eight bits, for drafts; products
by oneDNN's, of a matrix that was rearranged once, where the usual one rearranges it for every call;
products of one row by a matrix's columns. And what those of this package have in common: operators,
and a trial before they serve.

Shapes: N rows of D inputs each, O outputs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from medusa_heads.errors import first_line, warn
from medusa_heads.machine.devices import is_capturing

_KNOWN = ("x86_64", "AMD64")
_MOST_INPUT = 127  # of a row in eight bits
_PACKED_FOR = 16  # rows that the order of a packed matrix suits; of other numbers it is as right
_PACKABLE = (torch.float32, torch.bfloat16)
# What is said whenever a kernel in Triton is started: products are added without being rounded, as
# when the kernels were compared and timed. Triton 3.9 warns where nobody says it, and 3.10 rounds.
FUSED = {"enable_fp_fusion": True}
# Kept where this module is loaded again: with it its operators would go.
_operators: torch.library.Library = globals().get("_operators") or torch.library.Library(
    "medusa_heads", "FRAGMENT"
)


def int8_product(x_ND: Tensor, int8_OD: Tensor) -> Tensor:
    """Near x_ND @ int8_OD.T: inputs in float32, each row rounded to 255 steps; [N, O], float32."""
    unit_N1 = x_ND.abs().amax(dim=1, keepdim=True).div_(_MOST_INPUT).clamp_min_(1e-30)
    int8_ND = (x_ND / unit_N1).round_().to(torch.int8)
    return torch._int_mm(int8_ND, int8_OD.T).float().mul_(unit_N1)


def has_int8_products() -> bool:
    """Whether torch multiplies eight bits here by more than a loop."""
    there = hasattr(torch, "_int_mm") and torch.backends.mkldnn.is_available()
    return there and platform.machine() in _KNOWN


def pack(weight_OD: Tensor) -> Tensor:
    """A copy in an order of its own, which only `packed_product` reads."""
    kernels: Any = torch.ops.mkldnn
    return kernels._reorder_linear_weight(weight_OD.detach(), _PACKED_FOR)


def packed_product(x: Tensor, packed: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`linear(x, weight_OD, bias_O)`, (..., D) -> (..., O), rounded as other kernels round."""
    kernels: Any = torch.ops.mkldnn
    return kernels._linear_pointwise(x, packed, bias_O, "none", [], "")


def turn(weight_OD: Tensor) -> Tensor:
    """A copy by columns [D, O], which `turned_product` reads."""
    return weight_OD.detach().t().contiguous()


def turned_product(x: Tensor, turned_DO: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`linear(x, weight_OD, bias_O)`, (..., D) -> (..., O), rounded as other kernels round. For one
    row some processors read a wide matrix up to twice as fast by its columns."""
    product = x @ turned_DO
    return product if bias_O is None else product.add_(bias_O)


def has_packed_products(dtype: torch.dtype) -> bool:
    """Whether this build of torch multiplies packed matrices of a dtype on this CPU."""
    there = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if dtype not in _PACKABLE or not there:
        return False
    try:
        square = torch.ones(16, 16, dtype=dtype, device="cpu")
        packed_product(square, pack(square))
    # oneDNN has no bf16 on some processors, and torch promises neither operator.
    except (RuntimeError, AttributeError):
        return False
    return True


def operator(
    schema: str,
    run: Callable[..., Any],
    like: Callable[..., Any],
    devices: Sequence[str] = ("CPU",),
) -> Any:
    """An operator `medusa_heads::NAME` of torch, by which graphs call what no compiler looks into:
    what is told at run time alone.

    Args:
        schema: as torch writes it, such as `name(Tensor x) -> Tensor`.
        run: what it does.
        like: gives empty results of the same shapes.
        devices: where it does that, by torch's names.
    """
    name = schema.partition("(")[0]
    # A second copy of this package in one process calls what the first one made.
    if not hasattr(torch.ops.medusa_heads, name):
        _operators.define(schema)
        for device in devices:
            _operators.impl(name, run, device)
        _operators.impl(name, like, "Meta")
    return getattr(torch.ops.medusa_heads, name)


def in_triton(function: str) -> Callable[..., Any]:
    """A function of this package's that starts a kernel in Triton, such as `"trees.module.name"`,
    on the device that its first argument lies on."""
    module, _, name = function.rpartition(".")

    def start(*args: Any) -> Any:
        # Triton comes with torch where that is built for a GPU, and takes a second to import.
        kernel = getattr(import_module(f"medusa_heads.{module}"), name)
        with torch.cuda.device_of(args[0]):  # Triton starts kernels on the current one
            return kernel(*args)

    return start


def triton_operator(schema: str, function: str, like: Callable[..., Any]) -> Any:
    """The operator that such a function is; on a CPU Triton interprets its kernels, where it is
    told to."""
    return operator(schema, in_triton(function), like, ("CPU", "CUDA"))


class Tried:
    """Kernels of this package, which serve a GPU once they have been compiled for it and said what
    torch says.

    Args:
        agree: compiles them, and tells whether they do.
        otherwise: what a warning says is done without them.
    """

    def __init__(self, agree: Callable[[torch.device], bool], otherwise: str) -> None:
        self._agree, self._otherwise = agree, otherwise
        self._known: dict[torch.device, bool] = {}

    def serve(self, device: torch.device) -> bool:
        """Whether they do. Found out once in a process, where there is memory, which waits for the
        device; and not while a graph is recorded."""
        if device.type != "cuda":
            return False
        if device not in self._known:
            if is_capturing():
                return False
            try:
                self._known[device] = self._agree(device)
            # No compiler for this GPU, none at all, no memory: each has its own.
            except Exception as error:
                warn(f"{self._otherwise}: {first_line(error)}")
                if isinstance(error, torch.OutOfMemoryError):  # which says nothing of later
                    return False
                self._known[device] = False
        return self._known[device]
