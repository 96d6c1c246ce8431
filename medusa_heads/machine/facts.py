"""What this machine is: processor, instruction sets, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from medusa_heads.machine.container import processors_allowed

VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Of the environment: which keep torch from instructions that the processor has, and which say how
its threads wait."""

_CPUINFO = Path("/proc/cpuinfo")
# Those that decide how fast matrices are multiplied: of x86, then of ARM.
_INSTRUCTIONS = {
    "avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni",
    "amx_tile", "amx_bf16", "amx_fp16", "amx_int8",
    "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2", "svebf16", "sme",
}  # fmt: skip


def machine_facts() -> dict[str, Any]:
    """What decides the speed of computing here, as plain values: equal facts, equal speed."""
    return dict(_facts())


@cache
def _facts() -> dict[str, Any]:
    flags = {flag for line in _cpuinfo("flags", "Features")[:1] for flag in line.split()}
    return {
        "cpu": _processor(),
        "instructions": sorted(flags & _INSTRUCTIONS),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        **{name: os.environ.get(name) for name in VARIABLES},
        **_gpu(),
    }


def describe_machine() -> dict[str, Any]:
    """The facts, and what may differ from run to run: threads, the Python, and the load over 1, 5
    and 15 minutes; above the number of cores, other work shared the machine."""
    loads = load_averages()
    return machine_facts() | {
        "threads": torch.get_num_threads(),
        "load_average": loads and [round(load, 2) for load in loads],
        "python": platform.python_version(),
    }


def as_used(machine: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Such a description of what computed on one device: no other GPU is named, and none at all
    where that was the CPU."""
    on_cpu = device.type == "cpu"
    used = {name: told for name, told in machine.items() if not (on_cpu and name.startswith("gpu"))}
    if device.type == "cuda":
        used["gpu"] = torch.cuda.get_device_name(device)
    return used | {"device": str(device)}


def load_averages() -> tuple[float, float, float] | None:
    """Over 1, 5 and 15 minutes; None where the system does not say."""
    try:
        return os.getloadavg()
    except (AttributeError, OSError):  # Windows; Linux without /proc
        return None


def usable_cores() -> int:
    """Cores this process may use, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(cores, processors_allowed() or cores)


def _processor() -> str:
    """Its name, or what tells it from others."""
    if names := _cpuinfo("model name"):
        return names[0]
    # Linux has no name of ARM's, but numbers.
    if numbers := [*_cpuinfo("CPU implementer")[:1], *_cpuinfo("CPU part")[:1]]:
        return " ".join(["ARM", *numbers])
    if platform.system() == "Darwin":  # where Python knows no more than "arm"
        with suppress(OSError, subprocess.SubprocessError):
            ask = ["sysctl", "-n", "machdep.cpu.brand_string"]
            told = subprocess.run(ask, capture_output=True, text=True, timeout=5, check=True)
            return told.stdout.strip()
    return platform.processor() or "unknown"


def _cpuinfo(*names: str) -> list[str]:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    pairs = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in pairs if name.strip() in names]


def _gpu() -> dict[str, str]:
    """Name and driver of the GPU; nothing where there is none."""
    if torch.cuda.is_available():
        toolkit = str(torch.version.cuda or torch.version.hip)
        name = torch.cuda.get_device_name()
        return {"gpu": name, "gpu_toolkit": toolkit, "gpu_driver": _nvidia_driver()}
    if torch.xpu.is_available():
        return {"gpu": torch.xpu.get_device_name()}
    if torch.backends.mps.is_available():
        return {"gpu": "Apple GPU", "gpu_driver": platform.mac_ver()[0]}
    return {}


def _nvidia_driver() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
