"""Memory held at most within a block."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from medusa_heads.machine.devices import free_memory
from medusa_heads.machine.memory import PeakMemory

GPU = torch.device("cuda", 1)
OF_GRAPH = {"device": 1, "segment_pool_id": (0, 3), "total_size": 70, "allocated_size": 10}
OTHERS = [{**OF_GRAPH, "segment_pool_id": (0, 0)}, {**OF_GRAPH, "device": 0}]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts this")
def test_peak_memory_is_of_the_block_alone() -> None:
    def needed(size: int) -> int:
        memory = PeakMemory(torch.device("cpu"))
        # Mapped anew: what the allocator has kept of earlier tests would cost nothing.
        with mmap.mmap(-1, size) as pages:
            for first in range(0, size, mmap.PAGESIZE):
                pages[first] = 1
        peak, above = memory.read()
        assert peak is not None and above is not None and peak > above
        return above

    # What other threads give back meanwhile hides what the block takes: the best of some tries.
    much = max(needed(64_000_000) for _ in range(4))
    little = min(needed(4_000) for _ in range(4))
    assert 60_000_000 < much < 90_000_000 and little < 8_000_000


def test_what_graphs_work_in_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay asks for no memory, and nobody else gets what it writes to."""
    graphs: list[dict[str, object]] = []
    monkeypatch.setattr("medusa_heads.machine.memory.wait_for", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [*OTHERS, *graphs])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 130)
    memory = PeakMemory(GPU)
    graphs.append(OF_GRAPH)
    assert memory.read() == (190, 90)
    assert PeakMemory(GPU).read() == (190, 30)


def test_what_graphs_work_in_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what torch has and nobody uses, that of graphs is given to nobody; of an allocator that
    tells no such thing all counts."""

    def no_list() -> list[dict[str, object]]:
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful")

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [*OTHERS, OF_GRAPH])
    assert free_memory(GPU) == 1340
    monkeypatch.setattr(torch.cuda, "memory_snapshot", no_list)
    assert free_memory(GPU) == 1400
