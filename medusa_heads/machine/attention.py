"""Attention over the large caches of graphs: of what is in use, on a CPU; and on a GPU by the
kernel that is fastest there.

Shapes: B batch, H query heads, G heads of keys, N tokens, S slots, U of them in use, X and Y widths
of keys and values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_heads.agreement import TOLERANCE, is_half, relative_error
from medusa_heads.errors import MedusaWarning, first_line
from medusa_heads.machine.choice import GAIN
from medusa_heads.machine.kernels import operator
from medusa_heads.machine.measurements import Measurements, as_seconds, measurement_folder

KIND = "attention"
_SLOTS = 64  # of a cache that attention reads or leaves out together
_BITS = 64  # of a word: tokens that it can speak of
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BYTES = 256 << 20  # of the layers that are measured in turns: more than a GPU's cache holds
_MOST_LAYERS = 32
_ROUNDS = 9

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

    @classmethod
    def of(cls, query_BHNX: Tensor, key_BGSX: Tensor, value_BGSY: Tensor) -> Attended:
        """Of these."""
        batch, heads, tokens, width = query_BHNX.shape
        shared, slots = key_BGSX.shape[1:3]
        return cls(batch, heads, shared, tokens, slots, width, value_BGSY.shape[-1])


_known: dict[str, bool] = {}


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


def seen_words(mask_BNS: Tensor) -> tuple[Tensor, Tensor]:
    """What `split_attention` is told of a mask of numbers, of zeros and of what is not seen: its
    words [B, S] and spans [B, 2]. N is at most 64."""
    seen_BNS = mask_BNS > torch.finfo(mask_BNS.dtype).min / 2
    tokens, slots = seen_BNS.shape[1:]
    bits_N1 = torch.arange(tokens, device=mask_BNS.device)[:, None]
    words_BS = (seen_BNS.long() << bits_N1).sum(dim=1)
    any_BS = seen_BNS.any(dim=1).int()
    first_B = any_BS.argmax(dim=1)
    behind_B = (slots - any_BS.flip(1).argmax(dim=1)).where(any_BS.any(dim=1), first_B)
    return words_BS, torch.stack([first_B, behind_B], dim=1).int()


def split_pays(device: torch.device, dtype: torch.dtype, sizes: Attended) -> bool:
    """Whether `split_attention` is faster here than `grouped_attention` over a cache that is half
    full, and says the same. Measured once for the same GPU and sizes."""
    if device.type != "cuda" or dtype not in _DTYPES or sizes.tokens > _BITS:
        return False
    facts = {"device": str(device), "dtype": str(dtype), **sizes._asdict()}
    store, key = Measurements(), f"{measurement_folder()} {facts}"
    if key not in _known:
        try:
            kept: Any = store.read(KIND, facts)
            usual, split = (as_seconds(kept[name]) for name in ("usual", "split"))
        except (KeyError, TypeError, ValueError):
            try:
                usual, split = _measure(device, dtype, sizes)
            # No compiler for this GPU, blocks too large for it, no memory: each has its own.
            except Exception as error:
                reason = f"attention goes on by torch's own kernel: {first_line(error)}"
                warnings.warn(reason, MedusaWarning, stacklevel=2)
                usual, split = 0.0, 1.0
            else:
                store.write(KIND, facts, {"usual": usual, "split": split})
        _known[key] = usual >= GAIN * split
    return _known[key]


def _measure(device: torch.device, dtype: torch.dtype, sizes: Attended) -> tuple[float, float]:
    """Seconds of a layer, of the usual kernel and of the split one, on a GPU."""
    usual, split, layers = rivals(device, dtype, sizes)
    expected, got = (each(*layers[0]).flatten(0, -2).float() for each in (usual, split))
    if (error := relative_error(got, expected)) > TOLERANCE[is_half(dtype)]:
        raise ArithmeticError(f"another kernel's results differ by {error:.2g} deviations")
    return replayed(usual, layers), replayed(split, layers)


def rivals(
    device: torch.device, dtype: torch.dtype, sizes: Attended, in_use: float = 0.5
) -> tuple[Attend, Attend, list[tuple[Tensor, Tensor]]]:
    """The usual attention and the split one, of random tokens that see this part of a cache; and
    layers of it, more than a processor's own memory holds."""
    batch, heads, shared, tokens, slots, width, wide = sizes
    random = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device, dtype=dtype)

    query_BHNX = numbers(batch, tokens, heads, width).transpose(1, 2)
    of_one = batch * shared * slots * (width + wide) * query_BHNX.element_size()
    count = min(max(_BYTES // of_one, 1), _MOST_LAYERS)
    layers = [
        (numbers(batch, shared, slots, width), numbers(batch, shared, slots, wide))
        for _ in range(count)
    ]
    mask_B1NS = torch.full((batch, 1, tokens, slots), torch.finfo(dtype).min).to(device, dtype)
    mask_B1NS[..., : max(int(in_use * slots), 1)] = 0.0
    words_BS, span_B2 = seen_words(mask_B1NS[:, 0])
    mask_B1MS = mask_B1NS.repeat(1, 1, heads // shared, 1)

    def usual(key_BGSX: Tensor, value_BGSY: Tensor) -> Tensor:
        return grouped_attention(query_BHNX, key_BGSX, value_BGSY, mask_B1MS, None)

    def split(key_BGSX: Tensor, value_BGSY: Tensor) -> Tensor:
        return _split(query_BHNX, key_BGSX, value_BGSY, words_BS, span_B2, None)

    return usual, split, layers


def replayed(attend: Attend, layers: list[tuple[Tensor, Tensor]]) -> float:
    """Seconds that a layer takes in a CUDA graph of all of them, the least of some rounds."""
    taken = []
    with torch.cuda.device_of(layers[0][0]):
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):  # what is compiled is not captured
            attend(*layers[0])
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in layers:
                attend(*layer)
        for _ in range(_ROUNDS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            taken.append(began.elapsed_time(ended) / 1e3)
    return min(taken) / len(layers)


def _split(*args: Any) -> Tensor:
    # Triton comes with torch where that is built for a GPU, and takes a second to import.
    from medusa_heads.machine.split_attention import split_attention

    with torch.cuda.device_of(args[0]):  # Triton starts kernels on the current one
        return split_attention(*args)


def _like(query_BHNX: Tensor, _: Tensor, value_BGSY: Tensor, *others: object) -> Tensor:
    batch, heads, tokens, _width = query_BHNX.shape
    return query_BHNX.new_empty(batch, tokens, heads, value_BGSY.shape[-1])


# As graphs call them.
attention_of_part = operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor mask, float? scale) -> Tensor",
    attention_in_use,
    _like,
)
attention_of_words = operator(
    "split_attention(Tensor q, Tensor k, Tensor v, Tensor seen, Tensor span, float? scale)"
    " -> Tensor",
    _split,
    _like,
    ("CPU", "CUDA"),  # on a CPU Triton interprets its kernels, where it is told to
)
