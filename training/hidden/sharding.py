"""A frozen target spread over the processes of a run, for targets too large for each.

Each process keeps a part of every layer and gathers a layer only while it runs (FSDP2, Zhao et al.
2023, arXiv:2304.11277). Embeddings and lm_head stay whole in every process: heads read them. All
processes must run the target together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor, nn

from medusa_heads.target.fingerprint import weights_sha256
from medusa_heads.target.layers import layer_lists
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.hidden.launched import Sharding
from medusa_heads.training.hidden.meta_target import meta_target
from medusa_heads.training.hidden.tensor_parallel import PartedTarget

_Of = TypeVar("_Of")


def several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in any process; all must ask."""
    if not several_processes():
        return flag
    flags = torch.tensor(float(flag), device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def end_together(failed: Exception | None) -> None:
    """Let what failed in one process end all; all must ask. Raises it in the first one, which says
    why, and SystemExit in the others."""
    if not several_processes():
        if failed is not None:
            raise failed
        return
    found = [said for said in gather_object([failed and (str(failed) or repr(failed))]) if said]
    if found and dist.get_rank() > 0:
        raise SystemExit(2)
    if found:
        raise failed or ValueError(found[0])


def in_all(work: Callable[[], _Of]) -> _Of:
    """What this process makes of some work, if it succeeds in all of them; see `end_together`."""
    made: Any = None
    failed = None
    try:
        made = work()
    except (ValueError, OSError) as error:
        failed = error
    end_together(failed)
    return cast(_Of, made)


def digest_for_all(target: TargetModel) -> str:
    """The target's `weights_digest`, which the first process computes; all must ask."""
    if not several_processes():
        return target.weights_digest()
    others = dist.get_rank() > 0
    sent = [weights_sha256(target.model, gather_only=others)]
    dist.broadcast_object_list(sent, src=0)
    return sent[0]


def load_to_spread(arguments: TargetArguments, sharding: Sharding) -> TargetModel:
    """The target on the CPU, for `shard_target`; where it is loaded once, the first process has the
    weights and the others an empty one. One that is spread by its matrices is so at once. Raises
    ValueError: no such target, one to be quantised, or only one process."""
    _check_processes()
    if arguments.load_in_4bit:
        raise ValueError(
            "4-bit matrices cannot be spread over processes: leave shard_target out, and launch "
            "with configs/accelerate/ddp.yaml"
        )
    if sharding.by_matrix:
        return PartedTarget.load(arguments)
    if sharding.load_once and dist.get_rank() > 0:
        return meta_target(arguments)
    told = {**arguments.source(), **arguments.attention()}
    return TargetModel.from_pretrained(
        arguments.model_name_or_path, dtype=arguments.dtype, use=None, **told
    )


def shard_target(
    target: TargetModel, device: torch.device, sharding: Sharding | None = None
) -> None:
    """Spread a target over all processes, each with its part on `device`. From the CPU, no device
    ever holds all of it. Where it is empty, the first process's weights come. Raises ValueError:
    there is only one process, or no such layers are found."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharding = sharding or Sharding()
    _check_processes()
    model: Any = target.model
    layers = _layers(model, sharding.layer_classes)
    shape = (sharding.copies, dist.get_world_size() // sharding.copies)
    # By another name, peft would take the layers' matrices for parts of them.
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "fsdp"))
    mesh = mesh if sharding.copies > 1 else mesh["fsdp"]
    kept = target.get_input_embeddings(), target.get_output_embeddings()
    empty = any_process(any(p.is_meta for p in model.parameters()), device)
    if empty:
        _take_dtypes(model, device)
    weights = _tensors(model) if empty and dist.get_rank() == 0 else {}
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward)
    whole = {parameter for module in kept for parameter in module.parameters()}
    fully_shard(model, mesh=mesh, ignored_params=whole)
    if empty and dist.get_rank() > 0:
        model.to_empty(device=device)
        model.tie_weights()
    for module in kept:
        module.to(device)
    if empty:
        _send(model, weights, device)


def is_sharded(target: TargetModel) -> bool:
    """Whether processes share the target, by layers or matrices: then all must run it together."""
    if not dist.is_available():  # a torch that was built without
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(target, PartedTarget) or isinstance(target.model, FSDPModule)


def _check_processes() -> None:
    if not several_processes():
        raise ValueError(
            "the target is to be spread over processes, and there is one: start several with "
            "accelerate launch, or leave shard_target, tensor_parallel and FSDP out"
        )


def _layers(model: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    """The modules that are gathered one at a time, a part before what it lies in."""
    if classes:
        found = [module for module in model.modules() if type(module).__name__ in classes]
        if missing := set(classes) - {type(module).__name__ for module in found}:
            raise ValueError(
                f"fsdp_transformer_layer_cls_to_wrap names {sorted(missing)}, and "
                f"{type(model).__name__} has no such modules: leave it out, and the target's "
                "layers are found"
            )
        return found[::-1]
    lists = [list(part) for part in layer_lists(model).values()]
    if not lists:
        raise ValueError(
            f"expected a list of layers in {type(model).__name__}, found none: leave shard_target "
            "and FSDP out"
        )

    def numbers(layers: list[nn.Module]) -> int:
        return sum(weight.numel() for layer in layers for weight in layer.parameters())

    return max(lists, key=numbers)


def _take_dtypes(model: nn.Module, device: torch.device) -> None:
    """Give what is empty here the dtypes of the first process."""
    own = dict([*model.named_parameters(), *model.named_buffers()])
    sent: list[Any] = [[(name, tensor.shape, tensor.dtype) for name, tensor in own.items()]]
    dist.broadcast_object_list(sent, src=0)
    same = [(name, tensor.shape) for name, tensor in own.items()] == [e[:2] for e in sent[0]]
    if any_process(not same, device):
        raise ValueError(
            f"the weights of {type(model).__name__} do not follow from its configuration alone: "
            "set fsdp_cpu_ram_efficient_loading: false, so that each process reads them"
        )
    for name, _, dtype in sent[0]:
        if own[name].is_meta:
            own[name].data = own[name].data.to(dtype)


@torch.no_grad()
def _send(model: nn.Module, weights: dict[str, Tensor], device: torch.device) -> None:
    """Hand the first process's weights and buffers round, one after the other."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, own in _tensors(model).items():
        whole = torch.empty(own.shape, dtype=own.dtype, device=device)
        if weights:
            whole.copy_(weights[name])
        if isinstance(own, DTensor):
            whole = distribute_tensor(whole, own.device_mesh, own.placements)
        else:
            dist.broadcast(whole, src=0)
        own.copy_(whole)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers, each once."""
    return {n: tensor.detach() for n, tensor in [*model.named_parameters(), *model.named_buffers()]}
