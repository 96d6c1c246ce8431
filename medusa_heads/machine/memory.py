"""How much memory a process takes at most."""

from __future__ import annotations

from pathlib import Path

import torch

from medusa_heads.machine.devices import held_by_graphs, wait_for

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Watches from here on: a GPU's allocator, or (on Linux) this process's resident memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        if device.type == "cuda":
            wait_for(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device) + held_by_graphs(device)
            return
        try:
            _RESET.write_text("5")  # the highest so far becomes what is held now
            self._before = resident("VmRSS")
        except OSError:  # no such counter here
            pass

    def read(self) -> tuple[int | None, int | None]:
        """Bytes held at most since then, and how many of them were not held before; None where the
        system does not say."""
        if self._before is None:
            return None, None
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) + held_by_graphs(self._device)
        else:
            peak = resident("VmHWM")
        return peak, max(peak - self._before, 0)


def resident(name: str) -> int:
    """Bytes of this process that Linux counts as VmRSS, or as VmHWM, its peak. Raises OSError:
    nobody counts them here."""
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")
