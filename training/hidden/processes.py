"""What the processes of a run tell one another."""

from __future__ import annotations

import torch
import torch.distributed as dist


def several_processes() -> bool:
    """Whether this one is of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def anywhere(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in any process; all must ask."""
    if not several_processes():
        return flag
    flags = torch.tensor(float(flag), device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())
