"""A frozen target spread over the processes of a run, for targets too large for each.

Each process keeps a part of every layer and gathers a layer only while it runs (FSDP2, Zhao et al.
2023, arXiv:2304.11277). Embeddings and lm_head stay whole in every process: heads read them. All
processes must run the target together.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from medusa_heads.target import TargetModel


def shard_target(target: TargetModel, device: torch.device) -> None:
    """Spread a target that lies on the CPU over all processes, each with its part on `device`.

    The CPU must hold the target once for each process of the machine, but no device ever does.

    Raises:
        ValueError: there is only one process, or no layers are found.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        raise ValueError(
            "shard_target spreads the target over processes, and there is one: start several with "
            "accelerate launch, or leave it out"
        )
    lists = [part for part in target.model.modules() if isinstance(part, nn.ModuleList)]
    if not lists:
        raise ValueError(
            f"expected a list of layers in {type(target.model).__name__}, found none: leave "
            "shard_target out"
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = {target.get_input_embeddings().weight, target.get_output_embeddings().weight}
    for layer in max(lists, key=_size):
        fully_shard(layer, mesh=mesh)
    fully_shard(target.model, mesh=mesh, ignored_params=whole)
    for module in (target.get_input_embeddings(), target.get_output_embeddings()):
        module.to(device)


def is_sharded(target: TargetModel) -> bool:
    """Whether `shard_target` was here: then all processes must run the target together."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(target.model, FSDPModule)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
