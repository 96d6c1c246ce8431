"""Memory held at most within a block."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from medusa_heads.machine.memory import PeakMemory


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
    graph = {"device": 1, "segment_pool_id": (0, 3), "total_size": 70, "allocated_size": 10}
    others = [{**graph, "segment_pool_id": (0, 0)}, {**graph, "device": 0}]
    graphs: list[dict[str, object]] = []
    monkeypatch.setattr("medusa_heads.machine.memory.wait_for", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [*others, *graphs])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 130)
    gpu = torch.device("cuda", 1)
    memory = PeakMemory(gpu)
    graphs.append(graph)
    assert memory.read() == (190, 90)
    assert PeakMemory(gpu).read() == (190, 30)
