"""The device to compute on: the one that was asked for, or the best there is; its memory; and what
a GPU is started to do, captured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from medusa_heads.errors import first_line
from medusa_heads.machine.container import memory_left


def find_device(asked: str | torch.device | None = None) -> torch.device:
    """The device asked for; else the first of cuda, xpu, mps and cpu that works here. Raises
    ValueError: torch knows no device of this name, or has none here."""
    if asked is None:
        return next(device for device in devices_here() if _failure(device) is None)
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ValueError(
            f"expected a device such as cpu or cuda, got {str(asked)!r}: {first_line(error)}"
        ) from error
    if (failure := _failure(device)) is not None:
        raise ValueError(
            f"the device {str(asked)!r} cannot be used here ({first_line(failure)}): leave device "
            "out, or give one that `medusa-heads env` lists"
        ) from failure
    return device


def devices_here() -> list[torch.device]:
    """The devices that torch says are here, best first; the last one is the CPU."""
    here = {
        "cuda": torch.cuda.is_available(),
        "xpu": torch.xpu.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    return [torch.device(name) for name, there in here.items() if there]


def other_gpus(than: torch.device) -> list[torch.device]:
    """The others of its kind on which something can be computed here."""
    if than.type != "cuda":
        return []
    own = torch.cuda.current_device() if than.index is None else than.index
    others = (torch.device("cuda", n) for n in range(torch.cuda.device_count()) if n != own)
    return [device for device in others if _failure(device) is None]


def _failure(device: torch.device) -> Exception | None:
    """Why nothing can be computed there, if so: too old a driver, a GPU without kernels, .."""
    try:
        (torch.ones(1, device=device) + 1).item()
    except Exception as error:  # AssertionError, ModuleNotFoundError, ..: each backend has its own
        return error
    return None


def wait_for(device: torch.device) -> None:
    """Until a device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices of a dtype can be multiplied on a device, at their own speed on a GPU."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        with torch.cuda.device(device):  # of the current one torch tells, and others may be older
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        matrix = torch.ones(2, 2, dtype=dtype, device=device)
        (matrix @ matrix).sum().item()
    except (RuntimeError, TypeError):
        return False
    return True


def in_float64(x: Tensor) -> Tensor:
    """In double precision; on the CPU where the device has none."""
    return x.double() if has_float64(x.device) else x.cpu().double()


@cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in double precision, as Macs' GPUs and some of Intel's do not."""
    return device.type in ("cpu", "cuda") or computes_in(device, torch.float64)


def low_precision(device: torch.device, *, training: bool = False) -> torch.dtype | None:
    """bfloat16, or else float16; None for a device that computes in neither. Training takes no
    float16, whose gradients would have to be scaled, nor autocast on mps."""
    if training and device.type == "mps":
        return None
    known = (torch.bfloat16,) if training else (torch.bfloat16, torch.float16)
    return next((dtype for dtype in known if computes_in(device, dtype)), None)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be had on a device, of a container's if it has fewer; None where nobody
    says."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused - held_by_graphs(device)
    if device.type == "xpu":
        unused = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
        try:
            return int(torch.xpu.mem_get_info(device)[0]) + unused
        except RuntimeError:  # some of Intel's do not tell
            return None
    if device.type not in ("cpu", "mps"):
        return None
    from psutil import virtual_memory

    free = []
    if device.type == "mps":  # which computes in the memory of the processor
        free.append(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    with suppress(OSError):  # no /proc
        free.append(virtual_memory().available)
    if (left := memory_left()) is not None:
        free.append(left)
    return min(free, default=None)


def held_by_graphs(device: torch.device) -> int:
    """Bytes of a GPU in which recorded graphs work: torch counts them as free, and gives them to
    nobody else. It looks at every block of memory, some milliseconds of a large model."""
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # of an allocator that keeps no such list
        return 0
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["device"] == index and any(segment["segment_pool_id"])
    )


def give_back() -> None:
    """Memory of GPUs that torch keeps and nobody uses. It does so by itself where memory is short,
    but not while anything is captured; nor is it done here while another thread captures."""
    with suppress(RuntimeError):
        torch.cuda.empty_cache()


def is_capturing() -> bool:
    """Whether what this thread starts on the current GPU goes into a graph, and is not done."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def captured(
    graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any, aside: torch.cuda.Stream
) -> Iterator[None]:
    """Within the block, what is started on a GPU goes into a graph, by this stream, and is not
    done. Where the block breaks off, or what it starts is refused, the GPU goes on as before.
    Raises RuntimeError: what was started cannot be captured."""
    with torch.cuda.device(device), nothing_collected(), _own_workspaces():
        here = torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            try:
                # Of this GPU's own stream; other threads may do as they like meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                yield
            except BaseException:
                with suppress(RuntimeError):  # the first one says why
                    _end(graph, device, pool)
                raise
            _end(graph, device, pool)
        here.wait_stream(aside)


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Within the block, products are made in no memory that was taken before. torch keeps what
    cuBLAS works in for each stream, of which there are 32, and a graph remembers where that lies.
    From torch 2.12 on it is let go of with any graph that was captured by such a stream, and it may
    be of the pool of a graph that is gone: others would write to what is by then somebody else's.
    So each capture takes it anew, from its own pool, and keeps it there. Raises RuntimeError: this
    torch gives no way to."""
    clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        raise RuntimeError(f"torch {torch.__version__} does not let go of what cuBLAS works in")
    clear()
    try:
        yield
    finally:
        clear()


def _end(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError as error:  # what was refused has broken it, though nobody may have heard
        _repair(device, pool)
        if "out of memory" in str(error):  # of the whole graph, as CUDA and not torch says it
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def _repair(device: torch.device, pool: Any) -> None:
    """After a graph that broke in the middle, on its stream: memory is given out as before, and
    random numbers are drawn. Both wait for an end that never came."""
    with suppress(RuntimeError, AttributeError):  # torch does not promise this name
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    torch.cuda.synchronize(device)
    whole = torch.cuda.CUDAGraph()
    whole.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=device)
    whole.capture_end()


_counting = Lock()
_uncollected = [0, True]  # blocks of all threads, and whether garbage was collected before them


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Within the block no garbage is collected: another target of this model would take its hooks
    along in the middle of what is traced, to which they belong."""
    with _counting:
        if not _uncollected[0]:
            _uncollected[1] = gc.isenabled()
        _uncollected[0] += 1
        gc.disable()
    try:
        yield
    finally:
        with _counting:
            _uncollected[0] -= 1
            if not _uncollected[0] and _uncollected[1]:
                gc.enable()
