"""A function of tensors as a CUDA graph: what it starts on a GPU, started again at once, over the
same memory.

torch.compile makes fewer and faster kernels, for which it takes half a minute. A recording is made
in the time that the function takes, and leaves as little to the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa_heads.machine.graphs import nothing_collected

_PACKAGES = ("medusa_heads", "transformers.generation")  # whose objects' attributes are looked at
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


def records(device: torch.device) -> bool:
    """Whether functions can be recorded on it."""
    return device.type == "cuda" and torch.version.hip is None


class Recording:
    """What a function does on a GPU, to be done again.

    Args:
        function: what it reads lies where it lies for good. It must not wait for the GPU, nor move
            numbers from the host there. It is called once, without an effect, and should have been
            called before: what it prepares is not recorded.
        device: the GPU.
        pool: of `memory_pool`, for what it makes; recordings of one pool are replayed one by one,
            and what one has returned is used up before the next.

    Attributes:
        result: what the function returned: tensors whose content the last replay wrote.

    Raises:
        RuntimeError: something in the function cannot be recorded.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        read = _Read()
        with torch.cuda.device(device), nothing_collected():
            here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(here)
            with torch.cuda.stream(aside), self._captured(pool), read:
                self.result = function()
            here.wait_stream(aside)
        self._held = read.held

    @contextmanager
    def _captured(self, pool: Any) -> Iterator[None]:
        # Of this GPU's own stream; other threads may do as they like meanwhile.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # which says that it is no graph
                self._graph.capture_end()
            raise
        self._graph.capture_end()

    def replay(self) -> None:
        """Do it again."""
        self._graph.replay()


def memory_pool() -> Any:
    """What recordings share that are replayed one by one."""
    return torch.cuda.graph_pool_handle()


class _Read(TorchDispatchMode):
    """Memory that was there before what happens within.

    Attributes:
        held: by its address: as long as this is kept, nobody else gets it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Any] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for given in _storages((args, kwargs)):
            if given.data_ptr() not in self._made:
                self.held[given.data_ptr()] = given
        result = func(*args, **kwargs)
        made = {storage.data_ptr() for storage in _storages(result)}
        self._made |= made - self.held.keys()
        return result


def _storages(tree: Any) -> Iterator[Any]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()


def standing(*roots: object) -> tuple[Any, ...]:
    """What a recording depends on of objects that its function uses: where tensors lie and how,
    and plain values. Where it is the same, the recording serves; of modules their tensors alone."""
    found: list[Any] = []
    seen: dict[int, object] = {}
    left: deque[object] = deque(roots)
    while left:
        each = left.popleft()
        if isinstance(each, _PLAIN):
            found.append(each)
            continue
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            found.append((each.data_ptr(), each.shape, each.stride(), each.dtype))
        elif isinstance(each, nn.Module):
            found.extend((p.data_ptr(), p.shape, p.dtype) for p in each.parameters())
            found.extend((b.data_ptr(), b.shape, b.dtype) for b in each.buffers())
        elif isinstance(each, dict):
            for name, value in each.items():
                found.append(name if isinstance(name, _PLAIN) else type(name).__name__)
                left.append(value)
        elif isinstance(each, list | tuple | deque):
            found.append(len(each))
            left.extend(each)
        elif type(each).__module__.startswith(_PACKAGES):
            attributes = getattr(each, "__dict__", {})
            left.extend(attributes[name] for name in sorted(attributes))
    return tuple(found)
