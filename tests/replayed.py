"""What stands on a CPU for the recordings of a GPU: all operations are noted with the tensors that
they were given, and a replay does them again and writes where their first results lie. And models
that are decoded by recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from medusa_heads import HeadsConfig, MedusaModel, new_heads
from medusa_heads.machine.programs import Program, Script
from medusa_heads.machine.recording import MemoryPool, Recording
from medusa_heads.machine.watched import ModeOfOneThread
from tests.inference.on_device import NEW

_SPOILT = 0xFF  # as all bytes: NaN, and -1


class Replayed(Recording):
    """Takes a Recording's place. A program, of which no dispatcher sees the compiled parts, is run
    once more. As recordings of a pool share memory, a replay spoils what others have made."""

    _of_pools: ClassVar[dict[Any, WeakSet[Replayed]]] = {}  # by their handles

    def __init__(self, function: Callable[[], Any], device: torch.device, pool: MemoryPool) -> None:
        self._program = function if isinstance(function, Program) else None
        self._made: list[Tensor] = []
        self.result = []
        super().__init__(function, device, pool)

    @contextmanager
    def _recorded(self, device: torch.device, pool: MemoryPool) -> Iterator[None]:
        others = self._of_pools.get(handle := pool.handle())
        if others is not None and not others:  # as torch's allocator has it
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: a pool without a graph")
        self._of_pools.setdefault(handle, WeakSet()).add(self)
        noted = _Noted()
        if self._program is not None:
            for address, dtype in self._program.written.items():
                tensor = torch.empty(0, dtype=dtype).set_(self._program.held[address])
                noted.written.append((tensor, tensor.clone()))
        try:
            with noted if self._program is None else nullcontext():
                yield
        finally:
            for tensor, content in reversed(noted.written):  # a recording has no effect
                tensor.copy_(content)
        self._done, self._made = noted.done, noted.made
        self._others = self._of_pools[handle]

    def replay(self) -> None:
        self.replays += 1
        for other in self._others:
            if other is not self:
                for made in other._own():
                    with torch.inference_mode():  # where some were made
                        made.fill_(_SPOILT)
        if self._program is not None:
            for old, new in zip(self.result, self._program(), strict=True):
                old.copy_(new)
        for function, args, kwargs, results in self._done:
            made = function(*args, **kwargs)
            leaves = [made] if isinstance(made, Tensor) else tree_leaves(made)
            for old, new in zip(results, leaves, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def _own(self) -> list[Tensor]:
        """The bytes that it has made, and not got."""
        if self._program is None:
            return self._made
        return [
            _bytes(each)
            for each in _tensors(self.result)
            if _address(each) not in self._program.held
        ]


class _Noted(ModeOfOneThread):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[Any]]] = []
        self.written: list[tuple[Tensor, Tensor]] = []
        self.made: list[Tensor] = []
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                self.written += [(tensor, tensor.clone()) for tensor in _tensors(given)]
        self._known |= {_address(each) for each in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        new = [each for each in _tensors(result) if _address(each) not in self._known]
        self.made += map(_bytes, new)
        self._known |= set(map(_address, new))
        # The memory, whatever its owner comes to hold instead.
        given, named = tree_map(_memory, (args, kwargs))
        self.done.append((func, given, named, tree_leaves(result)))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _memory(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def noted_sizes(monkeypatch: MonkeyPatch) -> list[int]:
    """How many nodes the forwards had that become scripts from now on."""
    nodes: list[int] = []
    init = Script.__init__

    def counted(self: Script, program: Program, given: Any, size: int) -> None:
        nodes.append(size)
        init(self, program, given, size)

    monkeypatch.setattr(Script, "__init__", counted)
    return nodes


def with_heads(model: Any, tree: str = "7", **config: Any) -> MedusaModel:
    heads = new_heads(model, HeadsConfig(num_heads=3, **config))
    return MedusaModel(model, heads, tree=tree)


def text(model: Any, inputs: Any, **options: Any) -> Tensor:
    torch.manual_seed(3)
    made = model.generate(**inputs, **{"do_sample": False, "max_new_tokens": NEW, **options})
    assert isinstance(made, Tensor)
    return made


def uncaptured(medusa: MedusaModel) -> MedusaModel:
    return MedusaModel(medusa.target.model, medusa.heads, tree="none", compile=False)
