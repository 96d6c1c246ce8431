"""Device, dtype and threads for a use: the user's where they were given, else what is fastest."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

import torch

from medusa_heads.machine.devices import (
    computes_in,
    find_device,
    free_memory,
    low_precision,
    other_gpus,
)
from medusa_heads.machine.products import (
    Seconds,
    Shape,
    Use,
    dtype_name,
    product_seconds,
    thread_counts,
)

GAIN = 1.1  # what another dtype or thread count must be faster by, to be chosen
_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Choice:
    """What to compute with, and why: "float32: this CPU multiplies bfloat16 at 0.2 of float32's
    speed"."""

    device: torch.device
    dtype: torch.dtype  # of weights and activations; in training, of autocast (float32: none)
    threads: int  # of the CPU
    reason: str

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s'[: self.threads != 1]}"
        return f"{self.device}{threads if self.device.type == 'cpu' else ''}, {self.reason}"


def choose(
    use: Use,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    stored: torch.dtype | None = None,
    shape: Shape | None = None,
    count_threads: bool = True,
) -> Choice:
    """Choose for a use, and measure first where nobody did on this machine. A device or dtype that
    the user gave stays (the dtype "auto" is none). Raises ValueError: there is no such device or
    dtype here.

    Weights are never rounded by choice: those `stored` in float32 stay so, those in a low precision
    may become float32, which holds them exactly, where that is faster and memory holds it. Without
    `count_threads` the threads stay as they are, and nothing is measured for their sake."""
    shape = shape or Shape()
    asked = None if dtype in (None, "auto") else as_dtype(dtype)
    where, doubt = _place(device, shape, asked or stored)
    if asked is not None and not computes_in(where, asked):
        raise ValueError(f"{where} does not compute in {dtype_name(asked)}: give another dtype")
    low = _shorter(use, where, asked, stored)
    if asked is not None:
        chosen, reason = asked, f"{dtype_name(asked)} as asked"
    elif use != "train" and stored is not None and stored not in _LOW:
        chosen, reason = stored, f"{dtype_name(stored)} as its weights are stored"
    elif low is None:
        chosen, reason = torch.float32, f"float32: {where} has nothing shorter"
    elif where.type != "cpu":
        chosen, reason = low, f"{dtype_name(low)}: the fastest that {where} computes in"
    else:
        held = stored is not None and use != "train"
        seconds = _measured(use, where, low, shape)
        chosen, reason = _faster(seconds, low, shape, held=held)
    threads = torch.get_num_threads()
    if count_threads and where.type == "cpu" and thread_counts(where) != [threads]:
        seconds = _measured(use, where, low, shape)
        threads = fastest_threads(seconds, dtype_name(chosen)) or threads
    return Choice(where, chosen, threads, reason + doubt)


def speeds(
    use: Use,
    *,
    device: str | torch.device | None = None,
    stored: torch.dtype | None = None,
    shape: Shape | None = None,
) -> Seconds:
    """What `choose` goes by, by dtype and threads: speeds relative to float32's best. Raises
    ValueError: there is no such device."""
    where = find_device(device)
    low = _shorter(use, where, None, stored)
    seconds = _measured(use, where, low, shape or Shape())
    best = _best(seconds, "float32")
    return {each: best / taken for each, taken in seconds.items()}


def _shorter(
    use: Use, where: torch.device, asked: torch.dtype | None, stored: torch.dtype | None
) -> torch.dtype | None:
    """What could be faster than float32 on a device: the low precision given, or the usual one."""
    here = (dtype for dtype in (asked, stored) if dtype in _LOW and computes_in(where, dtype))
    return next(here, None) or low_precision(where, training=use == "train")


def _measured(use: Use, where: torch.device, low: torch.dtype | None, shape: Shape) -> Seconds:
    dtypes = ["float32"] if low is None else ["float32", dtype_name(low)]
    return product_seconds(use, where, dtypes, shape)


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    """The dtype of a name. Raises ValueError: there is none of this name, or it is not of
    weights."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"expected a dtype such as float32 or bfloat16, got {str(dtype)!r}")
    return found


def fastest_threads(seconds: Seconds, dtype: str) -> int | None:
    """The most threads, or fewer where these are clearly faster; None for what was not measured."""
    times = {count: taken for (name, count), taken in seconds.items() if name == dtype}
    if not times:
        return None
    most, best = max(times), min(times, key=times.__getitem__)
    return best if times[best] * GAIN <= times[most] else most


def _faster(
    seconds: Seconds, low: torch.dtype, shape: Shape, *, held: bool
) -> tuple[torch.dtype, str]:
    """float32 or a lower precision on the CPU, and why; `held`: the weights, and not autocast."""
    name = dtype_name(low)
    ratio = _best(seconds, "float32") / _best(seconds, name)
    if ratio >= GAIN:
        return low, f"{name}: this CPU multiplies it at {ratio:.1f} times float32's speed"
    needed, free = 4 * shape.parameters, free_memory(torch.device("cpu"))
    if held and free is not None and needed > free:
        return low, (
            f"{name}: in float32 the weights take {needed / 1e9:.0f} GB, more than the "
            f"{free / 1e9:.0f} GB of memory that are free"
        )
    if ratio > 0.95:
        return torch.float32, f"float32: {name} is not faster on this CPU"
    return torch.float32, f"float32: this CPU multiplies {name} at {ratio:.2g} of float32's speed"


def _place(
    device: str | torch.device | None, shape: Shape, dtype: torch.dtype | None
) -> tuple[torch.device, str]:
    """The device, and a remark where it is another GPU, or the CPU, because that one could not hold
    the weights."""
    where = find_device(device)
    if device is not None or where.type == "cpu" or dtype is None:
        return where, ""
    needed, free = dtype.itemsize * shape.parameters, free_memory(where)
    if free is None or needed <= free:
        return where, ""
    others = [(free_memory(gpu) or 0, gpu) for gpu in other_gpus(where)]
    most, other = max(others, default=(0, where), key=itemgetter(0))
    why = f"has {free / 1e9:.0f} GB free and the weights take {needed / 1e9:.0f} GB"
    if needed <= most:
        return other, f"; on {other}, because {where} {why}"
    return torch.device("cpu"), f"; on the CPU, because {where} {why}"


def _best(seconds: Seconds, dtype: str) -> float:
    return min(taken for (name, _), taken in seconds.items() if name == dtype)
