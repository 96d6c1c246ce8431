"""A function of tensors as a CUDA graph: what it starts on a GPU, started again at once, over the
same memory.

torch.compile makes fewer and faster kernels, for which it takes half a minute. A recording is made
in the time that the function takes, and leaves as little to the host.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from medusa_heads.agreement import TOLERANCE, finite, is_half, same_oddities
from medusa_heads.errors import forget_frames
from medusa_heads.machine.devices import captured, give_back, nothing_collected
from medusa_heads.machine.programs import Program
from medusa_heads.machine.watched import NothingRead, Watched

_PACKAGES = ("medusa_heads", "transformers.generation")  # whose objects' attributes are looked at
_MOST_COMPARED = 1 << 28  # bytes
# Compiled parts round in another way, which may tip one of many rows, or one that is alone. So they
# are compared so often at most, and most times all that is written may differ by this share.
_COMPARED, _ROUNDED = 3, 0.3
_CONFIGS = {"PretrainedConfig", "PreTrainedConfig"}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}
_PLAIN = {int, float, bool, str, bytes, type(None), torch.dtype, torch.device}
_KINDS = tuple(_PLAIN)
_CONTAINERS = {dict, OrderedDict, set, list, tuple}  # of which an empty one says nothing


def records(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


class Recording:
    """What a function does on a GPU, to be done again. Raises RuntimeError: something in the
    function cannot be recorded.

    Args:
        function: what it reads lies where it lies for good. It must not wait for the GPU, nor move
            numbers from the host there. It is called once or twice, without an effect, and should
            have been called before: what it prepares is not recorded. Or a watched program.
        pool: for what it makes; recordings of one pool are replayed one by one, and what one has
            returned is used up before the next.

    Attributes:
        result: what the function returned: tensors whose content the last replay wrote.
        replays: how often it was done again.
        agreements: how much of what changed the function changed too, in that memory of which it
            is least, from 0 to 1, whenever that was asked.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, pool: MemoryPool) -> None:
        self.agreements: list[float] = []
        self.replays = 0
        self.result: Any
        self._differences: list[list[float]] = []
        self._rounds = isinstance(function, Program)
        try:
            watched = self._seen(function, device, pool)
        except torch.OutOfMemoryError as error:  # torch keeps what is unused while it records
            forget_frames(error)  # which hold what was made
            self.__dict__.pop("_graph", None)
            give_back()
            watched = self._seen(function, device, pool)
        self._held = watched.held
        self._written = {
            address: torch.empty(0, dtype=dtype, device=device).set_(watched.held[address])
            for address, dtype in watched.written.items()
        }
        pool.living.add(self)

    def _seen(self, function: Any, device: torch.device, pool: MemoryPool) -> Program | Watched:
        if isinstance(function, Program):  # compiled parts are not seen, and ask nobody
            with self._recorded(device, pool):
                self.result = function()
            return function
        watched = Watched()
        with self._recorded(device, pool), watched, NothingRead():
            self.result = function()
        return watched

    @contextmanager
    def _recorded(self, device: torch.device, pool: MemoryPool) -> Iterator[None]:
        self._graph = torch.cuda.CUDAGraph()
        with nothing_collected(), captured(self._graph, device, pool.handle(), pool.stream(device)):
            yield

    def replay(self) -> None:
        self.replays += 1
        self._graph.replay()

    def let_go(self, module: nn.Module) -> None:
        """Of a module's tensors, which the module itself keeps where they are, or `standing` tells
        that it does not."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._held.pop(tensor.untyped_storage().data_ptr(), None)

    def agrees(self, function: Callable[[], Any]) -> bool | None:
        """Do it again, and call the function from where that began; which is what counts then.
        Returns whether the recording does what the function does; None where that is to be asked
        once more. Without memory to compare it does not, and there is no further agreement."""
        compared = self._compared(function)
        if compared is None:
            return False
        differences, changed = compared
        if not changed:
            return None
        self._differences.append(differences)
        self.agreements.append(1.0 - max(differences, default=0.0))
        if not any(differences):
            return True
        if not self._rounds:
            return False
        if len(self._differences) < _COMPARED:
            return None
        each = zip(*self._differences, strict=True)
        return all(sorted(of_one)[_COMPARED // 2] <= _ROUNDED for of_one in each)

    def _compared(self, function: Callable[[], Any]) -> tuple[list[float], bool] | None:
        """Of each memory that is written, what both say differently, as a share of what changed;
        and whether anything did. Large caches are left out: what is read of these is written again
        by the function first."""
        written = [each for each in self._written.values() if each.nbytes <= _MOST_COMPARED]
        before: list[Tensor] = []
        replayed: list[Tensor] = []
        try:
            before += [tensor.clone() for tensor in written]
            self.replay()
            replayed += [tensor.clone() for tensor in written]
        except torch.OutOfMemoryError:
            replayed.clear()
        if len(before) == len(written):
            for tensor, content in zip(written, before, strict=True):
                tensor.copy_(content)
        function()
        if len(replayed) < len(written):
            return None
        try:
            differences = list(map(_difference, replayed, written, before))
            same = all(torch.equal(*each) for each in zip(written, before, strict=True))
        except torch.OutOfMemoryError:
            return None
        return differences, not same or any(differences)


def _difference(one: Tensor, other: Tensor, before: Tensor) -> float:
    if one.is_floating_point():
        if not same_oddities(one, other):
            return 1.0
        off, changed = (finite(other - each).float() for each in (one, before))
        if bool(off.norm() <= TOLERANCE[is_half(one.dtype)] * finite(other).float().norm()):
            return 0.0
    else:
        off, changed = (other.double() - each.double() for each in (one, before))
    share = off.abs().sum() / changed.abs().sum()  # infinite where nothing was to change
    return min(float(share.nan_to_num(nan=0.0)), 1.0)


class MemoryPool:
    """What recordings share that are replayed one by one. torch lets go of a pool with the last one
    that was recorded in it, and refuses its handle from then on: those that come later share
    another.

    Attributes:
        living: the recordings that are left.
    """

    def __init__(self) -> None:
        self.living: WeakSet[Recording] = WeakSet()
        self._handle: Any = None
        self._stream: torch.cuda.Stream | None = None

    def handle(self) -> Any:
        """By which torch knows it, for one that begins before any other can be collected."""
        if not self.living:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """That captures them all: what another one has made in a pool, torch gives to nobody."""
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        return self._stream


def standing(*roots: object) -> tuple[Any, ...]:
    """What a recording depends on of objects that its function uses: where tensors lie and how,
    plain values, hooks, and how torch multiplies. Where it is the same, the recording serves."""
    found: list[Any] = [_how()]
    seen: dict[int, object] = {}
    left: list[object] = list(roots)
    classes: dict[type, Any] = {}
    for each in left:  # which grows meanwhile
        kind = type(each)
        if kind in _PLAIN:
            found.append(each)
            continue
        if id(each) in seen and not isinstance(each, _KINDS):
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            found.append((each.data_ptr(), each.shape, each.stride(), each.dtype))
        elif isinstance(each, dict):
            for name, value in each.items():
                found.append(name if isinstance(name, _KINDS) else type(name).__name__)
                left.append(value)
        elif isinstance(each, set | frozenset):
            found.append(sorted(map(str, each)))
        elif isinstance(each, list | tuple | deque):
            found.append(len(each))
            left.extend(each)
        elif isinstance(each, nn.Module):
            if kind not in classes:
                classes[kind] = _number(type(each).forward)
            found += [kind, classes[kind]]
            # A module has some twenty attributes, most of them empty or plain, and a model many
            # modules, of which every text asks.
            for name, value in vars(each).items():
                if name in _HOOKS:
                    hooks = [hook for hook in value.values() if not only_notes(hook)]
                    found += map(_number, hooks)
                elif type(value) in _PLAIN:
                    found += [name, value]
                elif name == "forward" and _is_packed(value):  # of another thread's step
                    continue
                elif type(value) not in _CONTAINERS or value:
                    found.append(name)
                    left.append(value)
        elif _is_looked_into(kind):
            attributes = getattr(each, "__dict__", {})
            left.extend(attributes[name] for name in sorted(attributes))
        elif isinstance(each, _KINDS):  # a member of an Enum that is a word, say
            found.append(each)
        elif callable(each):
            found.append(_number(each))
    return tuple(found)


def _is_packed(forward: Any) -> bool:
    return str(getattr(forward, "__module__", "")) == "medusa_heads.target.packed.layer"


def _is_looked_into(kind: type) -> bool:
    names = {base.__name__ for base in kind.__mro__}
    if "GenerationConfig" in names:  # which no step reads
        return False
    return kind.__module__.startswith(_PACKAGES) or not names.isdisjoint(_CONFIGS)


def only_notes(hook: Any) -> bool:
    """Whether a hook is ours or transformers' own, which note what passes and change nothing."""
    return str(getattr(hook, "__module__", "")).startswith(("medusa_heads", "transformers."))


_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_count = count()


def _number(function: Any) -> Any:
    """A number of this function alone, for good: another may come to lie where it lay."""
    if (of := getattr(function, "__self__", None)) is not None and not inspect.isbuiltin(function):
        return _number(of), _number(getattr(function, "__func__", None))
    try:
        if function not in _numbers:
            _numbers[function] = next(_count)
        return _numbers[function]
    except TypeError:  # nobody may hold it weakly
        return id(function)


def _how() -> tuple[Any, ...]:
    backends: Any = torch.backends
    cuda = backends.cuda
    return (
        *(torch.is_autocast_enabled(device) for device in ("cuda", "cpu")),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        # By these alone: once one of them is set, as transformers does, torch's older words for the
        # same raise. What is set by those is told here, too.
        *(of.fp32_precision for of in (cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul)),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_accumulation,
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        cuda.cudnn_sdp_enabled(),
    )
