"""How long matrix products take here, by dtype and threads: most of what a forward does.

The matrices are those of a target's MLPs, as many as it has or as hold more than a processor's
caches do. Shapes: R rows, D hidden, F intermediate; N rows of D inputs each, O outputs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from medusa_heads.machine.devices import wait_for
from medusa_heads.machine.facts import usable_cores
from medusa_heads.machine.kernels import (
    has_int8_products,
    has_packed_products,
    int8_product,
    pack,
    packed_product,
    turn,
    turned_product,
)
from medusa_heads.machine.measurements import (
    Contention,
    Measurements,
    as_seconds,
    measurement_folder,
)

Use = Literal["decode", "two", "draft", "few", "tree", "batch", "train"]
"""One row; the few of a draft; of a small tree; a tree of some 16 nodes; many rows or a prompt; a
training step."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a causal LM. The defaults are those of a small one."""

    hidden: int = 1024  # width of the hidden states
    intermediate: int = 2816  # width within an MLP
    vocab: int = 32000  # rows of the lm_head
    layers: int = 16
    experts: int = 1  # MLPs in each layer

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Of a transformers configuration; what it does not say is taken to be usual."""

        def number(*names: str) -> int | None:
            values = (getattr(config, name, None) for name in names)
            return next((v for v in values if isinstance(v, int) and v > 0), None)

        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        hidden = number("hidden_size", "n_embd", "d_model") or cls.hidden
        intermediate = number("intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
        experts = number("num_local_experts", "num_experts", "n_routed_experts") or 1
        if experts > 1:
            intermediate = number("moe_intermediate_size") or intermediate
        vocab = number("vocab_size") or cls.vocab
        layers = number("num_hidden_layers", "n_layer", "num_layers") or cls.layers
        return cls(hidden, intermediate, vocab, layers, experts)

    @property
    def parameters(self) -> int:
        """About how many weights there are."""
        attention, expert = 3 * self.hidden**2, 3 * self.hidden * self.intermediate
        return 2 * self.vocab * self.hidden + self.layers * (attention + self.experts * expert)


KIND = "products"
INT8, PACKED, TURNED = "int8", "packed ", "turned "
ROWS: dict[Use, int] = {
    **{"decode": 1, "two": 2, "draft": 4, "few": 8, "tree": 16},
    # Of fewer rows autocast's casts take longer than what they make faster.
    **{"batch": 512, "train": 512},
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WEIGHTS = 32 << 20  # of a pass: 128 MB in float32, more than most caches
_WEIGHTS_OF_ONE = 8 << 20  # a larger matrix shows nothing that its part does not
_PRODUCTS = 1 << 28  # multiplications of a pass: milliseconds
_WIDEST = 512  # of matrices for many rows, bound by arithmetic, whose speed a part shows as well
_ROUNDS, _FEWEST_ROUNDS = 9, 4
_SECONDS = 0.25  # of all rounds; the first ones are run whatever they take
_DECIDED = 1.5  # times the fastest, which the next one takes: further rounds would say the same
_HOPELESS = 2.5  # times the fastest
_HOPELESS_GAIN = 0.5  # with one row, which four would have to make up for
# Rounds of what is fastest disagree by at most 0.3 where nothing else runs, else by much more.
_AGREEING = 0.5
_SQUARE = Shape(hidden=1024, intermediate=1024, layers=5)
_SLOW = 0.1  # seconds: compiling a kernel does not take so long

# Whether a thread's clock tells passes apart: that of Windows counts in longer steps.
_TICKS = time.get_clock_info("thread_time").resolution < 1e-5

Seconds = dict[tuple[str, int], float]
"""By dtype and threads."""

_known: dict[str, Seconds] = {}


def product_seconds(use: Use, device: torch.device, dtypes: Sequence[str], shape: Shape) -> Seconds:
    """Seconds of a pass by dtype and threads, kept where they were measured before; INT8 are
    products of rounded inputs with rounded weights, for drafts, and PACKED or TURNED in front of a
    dtype those of packed weights, or of weights by columns. What was measured beside other programs
    serves this process alone: they may be gone later."""
    # Other kernels take the threads that everything else takes.
    others = any(dtype.startswith((INT8, PACKED, TURNED)) for dtype in dtypes)
    threads = [torch.get_num_threads()] if others else thread_counts(device)
    facts = {
        "use": use,
        "device": str(device),
        "dtypes": sorted(dtypes),
        "threads": threads,
        "matrices": matrices(use, shape),
    }
    store, key = Measurements(), f"{measurement_folder()} {facts}"
    if key not in _known:
        try:
            kept: Any = (store.read(KIND, facts) or {})["seconds"]
            seconds = {(d, n): as_seconds(kept[f"{d} {n}"]) for d in dtypes for n in threads}
        except (KeyError, TypeError, ValueError):
            seconds, undisturbed = measure(use, device, dtypes, threads, shape)
            if undisturbed:
                plain = {f"{dtype} {count}": taken for (dtype, count), taken in seconds.items()}
                store.write(KIND, facts, {"seconds": plain})
        _known[key] = seconds
    return dict(_known[key])


def int8_gain(dtype: torch.dtype) -> float:
    """How many times as fast as in the dtype products of one row and of four are in eight bits, on
    this CPU with the threads that torch uses; 0.0 where there is but a loop for them. Without
    instructions for them it can be less than once, by far with one row alone, which is then all
    that is timed."""
    if not has_int8_products():
        return 0.0
    of_one = _gain(INT8, dtype, ("decode",), _SQUARE)
    return of_one if of_one <= _HOPELESS_GAIN else _gain(INT8, dtype, ("decode", "draft"), _SQUARE)


def packed_gain(dtype: torch.dtype, outputs: int, inputs: int, use: Use = "few") -> float:
    """How many times as fast products of some rows are with matrices [outputs, inputs] that were
    packed, with the threads that torch uses; 0.0 where they cannot be."""
    own, shape = dtype_name(dtype), Shape(hidden=inputs, intermediate=outputs)
    return _gain(PACKED + own, dtype, (use,), shape) if has_packed_products(dtype) else 0.0


def turned_gain(dtype: torch.dtype, outputs: int, inputs: int) -> float:
    """How many times as fast the product of one row is with a matrix [outputs, inputs] by columns,
    with the threads that torch uses."""
    shape = Shape(hidden=inputs, intermediate=outputs)
    return _gain(TURNED + dtype_name(dtype), dtype, ("decode",), shape)


def _gain(other: str, dtype: torch.dtype, uses: Sequence[Use], shape: Shape) -> float:
    """Of another kernel over the usual one in a dtype, on the CPU."""
    own, threads, cpu = dtype_name(dtype), torch.get_num_threads(), torch.device("cpu")
    found = [product_seconds(use, cpu, [own, other], shape) for use in uses]
    return sum(each[own, threads] for each in found) / sum(each[other, threads] for each in found)


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("torch.")


def thread_counts(device: torch.device) -> list[int]:
    """Powers of two up to what torch uses, or to what a container may use if that is less; what
    torch uses alone where the user set it, or on a GPU."""
    most = torch.get_num_threads()
    if device.type != "cpu" or any(os.environ.get(name) for name in THREAD_VARIABLES):
        return [most]
    most = min(most, usable_cores())
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def matrices(use: Use, shape: Shape) -> tuple[int, int, int, int]:
    """R, F, D and how many matrices of [F, D] a pass multiplies."""
    rows, wide, narrow = ROWS[use], shape.intermediate, shape.hidden
    if rows > ROWS["tree"]:
        return rows, min(wide, _WIDEST), min(narrow, _WIDEST), 1
    wide = min(wide, max(_WEIGHTS_OF_ONE // narrow, 1))
    size = wide * narrow
    most = min(_WEIGHTS // size, _PRODUCTS // (rows * size), 3 * shape.layers)
    return rows, wide, narrow, max(most, 1)


def measure(
    use: Use, device: torch.device, dtypes: Sequence[str], threads: Sequence[int], shape: Shape
) -> tuple[Seconds, bool]:
    """Interleaved, of each the least: whatever else runs here only ever adds to a time, to that of
    one thread nothing by making it wait; and whether nothing else that ran can have mattered. What
    takes long and is far behind the fastest is left with what it took in the rounds before."""
    contention = Contention()
    passes = {dtype: _pass(use, device, dtype, shape) for dtype in dtypes}
    running = [(dtype, count) for dtype in dtypes for count in threads]
    times: dict[tuple[str, int], list[float]] = {each: [] for each in running}
    before = torch.get_num_threads()
    try:
        fewest = threads[0]
        for dtype in dtypes:
            # The first call compiles a kernel for its sizes; what is slow beyond that is run once.
            first = _timed(passes[dtype], fewest, device)
            others = [min(times[other, fewest]) for other in dtypes if times[other, fewest]]
            slow = first > _SLOW and first > _HOPELESS * min(others, default=first)
            for count in threads:
                if count != fewest and not slow:
                    _timed(passes[dtype], count, device)
                times[dtype, count].append(first if slow else _timed(passes[dtype], count, device))
        started = time.perf_counter()
        for number in range(1, _ROUNDS):
            enough = _decided(times) or time.perf_counter() - started > _SECONDS
            if number >= _FEWEST_ROUNDS and enough:
                break
            least = min(map(min, times.values()))
            most = max(_HOPELESS * least, _SLOW / 4)
            running = [each for each in running if min(times[each]) < most]
            for dtype, count in running:
                times[dtype, count].append(_timed(passes[dtype], count, device))
    finally:
        torch.set_num_threads(before)
    seconds = {each: min(taken) for each, taken in times.items()}
    best = [min((each for each in times if each[0] == d), key=seconds.__getitem__) for d in dtypes]
    spread = max(_spread(times[each]) for each in best)
    return seconds, not contention.seen() and spread <= _AGREEING


def _decided(times: Mapping[Any, Sequence[float]]) -> bool:
    """Whether one is the fastest by far."""
    fastest, *others = sorted(map(min, times.values()))
    return not others or others[0] >= _DECIDED * fastest


def _spread(taken: Sequence[float]) -> float:
    """How much longer the upper quartile takes than the lower one; of a few rounds nothing is
    known."""
    quarter = len(taken) // 4
    return sorted(taken)[-1 - quarter] / sorted(taken)[quarter] - 1 if quarter else 0.0


def _timed(products: Callable[[], object], threads: int, device: torch.device) -> float:
    """Of one thread on the CPU its own seconds: while it waits for a busy processor nothing is
    computed, and a single wait would be longer than all products."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    own = _TICKS and threads == 1 and device.type == "cpu"
    clock = time.thread_time if own else time.perf_counter
    started = clock()
    products()
    return clock() - started


def _pass(use: Use, device: torch.device, name: str, shape: Shape) -> Callable[[], object]:
    """The products once; of training there and back in autocast, with weights in float32."""
    training = use == "train"
    dtype: torch.dtype = getattr(torch, name.rpartition(" ")[2])
    held = torch.float32 if training else dtype
    rows, wide, narrow, count = matrices(use, shape)
    options: Any = {"dtype": held, "device": device, "requires_grad": training}
    weights_FD = [
        torch.full((wide, narrow), 1 if name == INT8 else 0.01, **options) for _ in range(count)
    ]
    given = torch.float32 if name == INT8 else held
    x_RD = torch.full((rows, narrow), 0.01, **options | {"dtype": given})
    product: Callable[[Tensor, Tensor], Tensor] = int8_product if name == INT8 else linear
    if name.startswith(PACKED):
        product, weights_FD = packed_product, [pack(weight_FD) for weight_FD in weights_FD]
    if name.startswith(TURNED):
        product, weights_FD = turned_product, [turn(weight_FD) for weight_FD in weights_FD]

    @torch.inference_mode()
    def forward() -> None:
        with torch.autocast(device.type, enabled=False):  # whatever the caller does
            for weight_FD in weights_FD:
                product(x_RD, weight_FD)
        wait_for(device)

    def there_and_back() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            for weight_FD in weights_FD:
                linear(x_RD, weight_FD).sum().backward()
                weight_FD.grad = x_RD.grad = None
        wait_for(device)

    return there_and_back if training else forward
