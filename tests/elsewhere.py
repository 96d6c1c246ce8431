"""What Triton makes for GPUs that are not here, and a device that lacks what others have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def compiled_elsewhere(program: str) -> str:
    """What a program prints that compiles kernels, where nothing is interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    asked = [sys.executable, "-c", program]
    made = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "FP_FUSION" not in made.stderr  # Triton 3.9 warns of kernels without `FUSED`
    return made.stdout


class WithoutFloat64(TorchDispatchMode):
    """Within the block, the device "meta" has no numbers in double precision, as a Mac's GPU has
    none. What is moved from it to the CPU is zero."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        to = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and to is not None and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=to)
        made = func(*args, **kwargs)
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.is_meta and each.dtype == torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return made
