"""Attention over the large caches of graphs: of what is in use, on a CPU; and on a GPU by the
kernel that is fastest there.

Shapes: B batch, H query heads, G heads of keys, N tokens, S slots, U of them in use, X and Y widths
of keys and values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_heads.agreement import TOLERANCE, is_half, relative_error
from medusa_heads.errors import first_line, warn
from medusa_heads.machine.choice import GAIN
from medusa_heads.machine.devices import captured, is_capturing
from medusa_heads.machine.kernels import in_triton, operator, triton_operator
from medusa_heads.machine.measurements import Measurements, as_seconds, measurement_folder

KIND = "attention"
_SLOTS = 64  # of a cache that attention reads or leaves out together
_BITS = 64  # of a word: tokens that it can speak of
_WIDEST = {torch.float32: 128, torch.float16: 256, torch.bfloat16: 256}  # heads that find room
_BOTH = ("usual", "split")
_HELD = 128 << 20  # bytes that no GPU's own memory holds, where it does not say
_MOST_BYTES = 1 << 30
_MASK_OF_ONE = 1 << 17  # numbers of a row's mask, which one processor of a GPU reads
_ODD = 3  # slots besides whole blocks
_SEEN = 0.9  # of the slots in use, by each token
_WARM_UP, _ROUNDS = 3, 9

Attend = Callable[[Tensor, Tensor], Tensor]  # keys and values of a layer


class Attended(NamedTuple):
    """Sizes of a layer's attention in a graph."""

    batch: int
    heads: int
    shared: int  # heads of keys
    tokens: int
    slots: int
    width: int  # of a key
    wide: int  # of a value


_known: dict[str, bool] = {}
_short: set[str] = set()  # what there was no memory to measure, since a text began


def grouped_attention(
    query_BHNX: Tensor,
    key_BGSX: Tensor,
    value_BGSY: Tensor,
    mask: Tensor | None,
    scale: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of N tokens, where the queries of heads that share keys are further tokens of one
    head: keys are read once. The mask is that of these tokens; [B, N, H, Y], contiguous."""
    batch, heads, tokens, width = query_BHNX.shape
    shared = key_BGSX.shape[1]
    attended_BGMY = torch.nn.functional.scaled_dot_product_attention(
        query_BHNX.reshape(batch, shared, -1, width),
        key_BGSX,
        value_BGSY,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scale,
    )
    by_group = attended_BGMY.view(batch, shared, heads // shared, tokens, value_BGSY.shape[-1])
    return by_group.permute(0, 3, 1, 2, 4).reshape(batch, tokens, heads, -1).contiguous()


def attention_in_use(
    query_BHNX: Tensor, key_BGSX: Tensor, value_BGSY: Tensor, mask_B1NS: Tensor, scale: float | None
) -> Tensor:
    """The same over a cache of S slots, of which only the first so many are read that any token
    sees. The mask is one of numbers, and the last token sees the last slot that is in use: its own.
    """
    groups, slots = query_BHNX.shape[1] // key_BGSX.shape[1], key_BGSX.shape[2]
    seen_S = (mask_B1NS[:, 0, -1] > torch.finfo(mask_B1NS.dtype).min).any(dim=0)
    places = seen_S.nonzero()
    last = int(places[-1]) if len(places) else slots
    used = min((last // _SLOTS + 1) * _SLOTS, slots)
    mask_B1NU = mask_B1NS[..., :used]
    if mask_B1NU.shape[2] > 1:
        mask_B1NU = mask_B1NU.repeat(1, 1, groups, 1)
    return grouped_attention(
        query_BHNX, key_BGSX[:, :, :used], value_BGSY[:, :, :used], mask_B1NU, scale
    )


def attended(query_BHNX: Tensor, key_BGSX: Tensor, value_BGSY: Tensor) -> tuple[int, ...]:
    """Their sizes, as `Attended` has them: torch.compile hands on no tuple with names."""
    batch, heads, tokens, width = query_BHNX.shape
    shared, slots = key_BGSX.shape[1:3]
    return batch, heads, shared, tokens, slots, width, value_BGSY.shape[-1]


def split_pays(device: torch.device, dtype: torch.dtype, numbers: tuple[int, ...]) -> bool:
    """Whether `split_attention` is faster here than `grouped_attention` over a cache that is half
    full, and says the same. Measured once for the same GPU and `attended` numbers, where there is
    memory; and not while a graph is recorded."""
    sizes = Attended(*numbers)
    widest = max(sizes.width, sizes.wide)
    if device.type != "cuda" or sizes.tokens > _BITS or widest > _WIDEST.get(dtype, 0):
        return False
    facts = {"device": str(device), "dtype": str(dtype), **sizes._asdict()}
    key = f"{measurement_folder()} {facts}"
    if key not in _known:
        if key in _short or is_capturing():
            return False
        try:
            usual, split = _seconds(device, dtype, sizes, facts)
        # No compiler for this GPU, blocks too large for it, no memory: each has its own.
        except Exception as error:
            warn(f"attention goes on by torch's own kernel: {first_line(error)}")
            if isinstance(error, torch.OutOfMemoryError):  # which says nothing of later
                _short.add(key)
                return False
            usual, split = 0.0, 1.0
        _known[key] = usual >= GAIN * split
    return _known[key]


def ask_again() -> None:
    """A text begins: what there was no memory to measure, `split_pays` measures in it."""
    _short.clear()


def _seconds(
    device: torch.device, dtype: torch.dtype, sizes: Attended, facts: dict[str, Any]
) -> list[float]:
    """Of a layer, by the usual kernel and the split one; kept for those that come later."""
    from medusa_heads.machine import split_attention

    store, facts = Measurements(), {**facts, **kernel_facts(device, split_attention)}
    try:
        kept: Any = store.read(KIND, facts)
        return [as_seconds(kept[name]) for name in _BOTH]
    except (KeyError, TypeError, ValueError):
        *both, layers = rivals(device, dtype, sizes)
        expected, got = (each(*layers[0]).flatten(0, -2).float() for each in both)
        if (error := relative_error(got, expected)) > TOLERANCE[is_half(dtype)]:
            raise ArithmeticError(
                f"another kernel's results differ by {error:.2g} deviations"
            ) from None
        seconds = replayed(both, layers)
        store.write(KIND, facts, dict(zip(_BOTH, seconds, strict=True)))
        return seconds


def kernel_facts(device: torch.device, module: Any) -> dict[str, Any]:
    """What else the speed of a module's kernels depends on: who compiles them, what they say, on
    which GPU."""
    source = Path(module.__file__).read_bytes()
    here = torch.cuda.is_available()
    return {
        "triton": module.triton.__version__,
        "source": hashlib.sha256(source).hexdigest()[:16],
        "name": torch.cuda.get_device_name(device) if here else None,
    }


def rivals(
    device: torch.device, dtype: torch.dtype, sizes: Attended, in_use: float = 0.5
) -> tuple[Attend, Attend, list[tuple[Tensor, Tensor]]]:
    """The usual attention and the split one, of random tokens that see most of this part of a
    cache; and layers of it, more than a processor's own memory holds."""
    batch, heads, shared, tokens, slots, width, wide = sizes
    random = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device, dtype=dtype)

    query_BHNX = numbers(batch, tokens, heads, width).transpose(1, 2)
    used = max(int(in_use * slots) - _ODD, 1)
    of_one = batch * shared * (width + wide) * query_BHNX.element_size()
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    held = 2 * getattr(properties, "L2_cache_size", _HELD)
    count = min(max(held // (of_one * used), 1), max(_MOST_BYTES // (of_one * slots), 1))
    layers = [
        (numbers(batch, shared, slots, width), numbers(batch, shared, slots, wide))
        for _ in range(count + 1)
    ]
    allowed_B1NS = torch.zeros(batch, 1, tokens, slots, dtype=torch.bool, device=device)
    seen = torch.rand(batch, 1, tokens, used, generator=random, device=device) < _SEEN
    seen[..., : min(_ODD, used - 1)] = False  # padding
    seen[..., -1] = True
    allowed_B1NS[..., :used] = seen
    mask_B1NS = torch.zeros(allowed_B1NS.shape, dtype=dtype, device=device)
    mask_B1NS.masked_fill_(~allowed_B1NS, torch.finfo(dtype).min)
    words_BU = seen_words(mask_B1NS)
    mask_B1MS = mask_B1NS.repeat(1, 1, heads // shared, 1)

    def usual(key_BGSX: Tensor, value_BGSY: Tensor) -> Tensor:
        return grouped_attention(query_BHNX, key_BGSX, value_BGSY, mask_B1MS, None)

    def split(key_BGSX: Tensor, value_BGSY: Tensor) -> Tensor:
        return attention_of_words(query_BHNX, key_BGSX, value_BGSY, words_BU, None)

    return usual, split, layers


def replayed(
    rivals: Sequence[Callable[..., object]], layers: Sequence[Sequence[Tensor]]
) -> list[float]:
    """Seconds that a layer takes by each of them, in CUDA graphs of all layers that take turns; the
    least of some rounds."""
    taken: list[list[float]] = [[] for _ in rivals]
    with torch.cuda.device_of(layers[0][0]):
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        # What they return is nobody's, so their graphs may share memory.
        graphs, pool = [], torch.cuda.graph_pool_handle()
        for attend in rivals:
            with torch.cuda.stream(aside):  # what is compiled is not captured
                attend(*layers[0])
            aside.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with captured(graphs[-1], layers[0][0].device, pool, aside):
                for layer in layers:
                    attend(*layer)
        for number in range(_WARM_UP + _ROUNDS):
            for graph, seconds in zip(graphs, taken, strict=True):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                graph.replay()
                ended.record()
                ended.synchronize()
                if number >= _WARM_UP:
                    seconds.append(began.elapsed_time(ended) / 1e3)
    return [min(seconds) / len(layers) for seconds in taken]


def _seen(mask_B1NS: Tensor) -> Tensor:
    """What `split_attention` is told of a mask of numbers, of zeros and of what is not seen: its
    words [B, S + 2]. N is at most 64."""
    few = mask_B1NS.shape[1:].numel() <= _MASK_OF_ONE and mask_B1NS.element_size() <= 4
    if mask_B1NS.is_cuda and few:  # by one kernel, not a dozen
        words_BU: Tensor = in_triton("machine.split_attention.words_seen")(mask_B1NS)
        return words_BU
    seen_BNS = mask_B1NS[:, 0] > torch.finfo(mask_B1NS.dtype).min / 2
    tokens, slots = seen_BNS.shape[1:]
    bits_N1 = torch.arange(tokens, device=mask_B1NS.device)[:, None]
    words_BS = (seen_BNS.long() << bits_N1).sum(dim=1)
    any_BS = (words_BS != 0).int()
    first_B = any_BS.argmax(dim=1)
    behind_B = (slots - any_BS.flip(1).argmax(dim=1)).where(any_BS.any(dim=1), first_B)
    return torch.cat([words_BS, first_B[:, None], behind_B[:, None]], dim=1)


def _seen_like(mask_B1NS: Tensor) -> Tensor:
    return mask_B1NS.new_empty(len(mask_B1NS), mask_B1NS.shape[-1] + 2, dtype=torch.long)


def _like(query_BHNX: Tensor, _: Tensor, value_BGSY: Tensor, *others: object) -> Tensor:
    batch, heads, tokens, _width = query_BHNX.shape
    return query_BHNX.new_empty(batch, tokens, heads, value_BGSY.shape[-1])


# As graphs call them. Of the same mask words are made once in a graph, see NotingBackend.
seen_words = operator("seen(Tensor mask) -> Tensor", _seen, _seen_like, ("CPU", "CUDA"))
attention_of_part = operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor mask, float? scale) -> Tensor",
    attention_in_use,
    _like,
)
attention_of_words = triton_operator(
    "split_attention(Tensor q, Tensor k, Tensor v, Tensor seen, float? scale) -> Tensor",
    "machine.split_attention.split_attention",
    _like,
)
