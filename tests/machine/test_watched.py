"""Watched blocks of several threads."""

from __future__ import annotations

import gc
from threading import Event, Thread

import torch
from torch.utils import _python_dispatch

from medusa_heads.machine.devices import nothing_collected
from medusa_heads.machine.watched import Watched, asks


def test_blocks_of_two_threads_do_not_overlap() -> None:
    """Else torch would take one to be open for good, and compile nothing any more."""
    first_in, second_in = Event(), Event()

    def first() -> None:
        with Watched():
            first_in.set()
            second_in.wait(0.3)

    def second() -> None:
        first_in.wait()
        with Watched():
            second_in.set()
            one.join(0.3)

    one, other = Thread(target=first), Thread(target=second)
    one.start()
    other.start()
    one.join()
    other.join()
    assert second_in.is_set()
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    doubled = torch.compile(lambda x: x * 2, backend=count)
    assert doubled(torch.ones(1)).item() == 2 and len(graphs) == 1


def test_places_that_lie_elsewhere_are_copied() -> None:
    """Which waits for the host, as no graph can."""
    elsewhere, places = torch.empty(3, 3, device="meta"), torch.tensor([1])
    index, put = torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default
    assert asks(index, (elsewhere, [None, places]), {}) == "copied"
    assert asks(put, (elsewhere, [places], elsewhere[0]), {}) == "copied"
    assert asks(index, (elsewhere, [None, places.to("meta")]), {}) is None


def test_blocks_without_a_collection_may_overlap() -> None:
    """Garbage is collected again behind the last of all threads' blocks."""
    first, second = nothing_collected(), nothing_collected()
    assert gc.isenabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with nothing_collected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
