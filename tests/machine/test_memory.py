"""Memory held at most within a block."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from medusa_heads.machine import container
from medusa_heads.machine.container import memory_left, processors_allowed
from medusa_heads.machine.devices import free_memory
from medusa_heads.machine.facts import usable_cores
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


@pytest.mark.parametrize(
    ("own", "files", "left", "processors"),
    [
        (  # a container, which sees its own group as the root
            "0::/",
            {
                "memory.max": "1000",
                "memory.current": "700",
                "memory.stat": "anon 5\ninactive_file 100\n",
                "cpu.max": "150000 100000",
            },
            400,
            2,
        ),
        (  # a job of a scheduler: a limit around the group that has none
            "0::/jobs/7/task",
            {
                "jobs/7/task/memory.max": "max",
                "jobs/7/task/memory.current": "500",
                "jobs/7/task/memory.stat": "inactive_file 0",
                "jobs/7/task/cpu.max": "max 100000",
                "jobs/7/memory.max": "2000",
                "jobs/7/memory.current": "900",
                "jobs/7/memory.stat": "inactive_file 50",
                "jobs/7/cpu.max": "400000 100000",
            },
            1150,
            4,
        ),
        (  # the first version, in a container that is told the path on its host
            "4:memory:/host/7\n2:cpu,cpuacct:/host/7\n0::/",
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "300",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20",
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            720,
            1,
        ),
        (  # the same without limits
            "4:memory:/\n1:cpu:/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            None,
            None,
        ),
        ("0::/gr\udcfcn", {"gr\udcfcn/cpu.max": "50000 100000"}, None, 1),
        ("not what Linux writes", {}, None, None),
        (None, {}, None, None),
    ],
    ids=["container", "job", "version-1", "no-limit", "no-utf8", "other", "no-linux"],
)
def test_what_a_container_leaves(
    own: str | None,
    files: dict[str, str],
    left: int | None,
    processors: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(container, "_OWN", tmp_path / "own")
    monkeypatch.setattr(container, "_ROOT", tmp_path / "root")
    if own is not None:
        (tmp_path / "own").write_bytes(os.fsencode(own))
    for name, content in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(content)
    assert (memory_left(), processors_allowed()) == (left, processors)
    if left is not None:
        assert free_memory(torch.device("cpu")) == left
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64), raising=False)
    assert usable_cores() == (processors or 64)


def test_free_memory_is_known_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac's GPU has the memory of the processor."""

    def untold(_: torch.device) -> tuple[int, int]:
        raise RuntimeError("The device does not support querying its available free memory")

    xpu = torch.device("xpu", 0)
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda _: 500)
    monkeypatch.setattr(torch.xpu, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda _: (1000, 2000))
    assert free_memory(xpu) == 1400
    monkeypatch.setattr(torch.xpu, "mem_get_info", untold)
    assert free_memory(xpu) is None
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 900)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 200)
    assert free_memory(torch.device("mps")) == 700
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=600))
    assert free_memory(torch.device("mps")) == 600
    assert free_memory(torch.device("meta")) is None


def test_peak_memory_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts a Mac's, and what the processor holds is another's."""
    assert PeakMemory(torch.device("mps")).read() == (None, None)
    monkeypatch.setattr("medusa_heads.machine.memory.wait_for", lambda _: None)
    monkeypatch.setattr(torch.xpu, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.xpu, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.xpu, "max_memory_allocated", lambda _: 130)
    assert PeakMemory(torch.device("xpu", 0)).read() == (130, 30)
