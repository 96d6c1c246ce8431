"""How much memory a process takes at most."""

from __future__ import annotations

from pathlib import Path

import torch

from medusa_heads.machine.devices import held_by_graphs, wait_for

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_COUNTED = ("cuda", "xpu")  # whose allocators know how much they gave out at most


class PeakMemory:
    """Watches from here on: a GPU's allocator, or (on Linux) this process's resident memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        if device.type in _COUNTED:
            wait_for(device)
            counted = torch.get_device_module(device)
            counted.reset_peak_memory_stats(device)
            self._before = counted.memory_allocated(device) + _of_graphs(device)
            return
        if device.type != "cpu":  # nobody counts what is held there
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
        if self._device.type in _COUNTED:
            counted = torch.get_device_module(self._device)
            peak = counted.max_memory_allocated(self._device) + _of_graphs(self._device)
        else:
            peak = resident("VmHWM")
        return peak, max(peak - self._before, 0)


def _of_graphs(device: torch.device) -> int:
    return held_by_graphs(device) if device.type == "cuda" else 0


def resident(name: str) -> int:
    """Bytes of this process that Linux counts as VmRSS, or as VmHWM, its peak. Raises OSError:
    nobody counts them here."""
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")
