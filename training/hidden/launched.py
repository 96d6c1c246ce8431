"""What `accelerate launch` asks for. Light: nothing here imports torch before it is needed.

An FSDP launch spreads the frozen target, where the memory is. What learns is small beside it: it
stays whole in every process, with averaged gradients, as in a DDP launch; so checkpoints are the
same, and can be resumed under either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from medusa_heads.training.arguments.target import TargetArguments

_FSDP, _SIZES = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"
_DDP = "configs/accelerate/ddp.yaml"
_OTHERS = {"DeepSpeed": "ACCELERATE_USE_DEEPSPEED", "Megatron-LM": "ACCELERATE_USE_MEGATRON_LM"}


@dataclass(frozen=True)
class Sharding:
    """How a target is spread over the processes."""

    layer_classes: tuple[str, ...] = ()
    """Of the modules that are gathered one at a time. Default: the model's layers."""
    reshard_after_forward: bool = True
    """Give a gathered layer up at once; else all stay, which takes the memory of the target."""
    load_once: bool = True
    """The first process alone reads the weights, and hands them round."""
    copies: int = 1
    """Of the target, each spread over as many processes next to each other, as those of a node."""
    by_matrix: bool = False
    """A part of every matrix in each process (tensor parallelism), in place of all of that."""

    def check_joint(self) -> None:
        """Raises ValueError where no adapter can learn in a target that lies so."""
        if self.by_matrix or self.copies > 1:
            name = "tensor_parallel" if self.by_matrix else "parallelism_config"
            raise ValueError(
                "an adapter learns in a target that is whole in each process, or spread over all "
                f"of them by its layers: leave {name} or joint out"
            )


def sharding_of(arguments: TargetArguments) -> Sharding | None:
    """How the launch and the flags want the target spread over the processes; None where each has
    a whole one. Raises ValueError: the one cannot meet the other; nothing is loaded yet."""
    launched = launched_sharding()
    by_matrix, mapped = arguments.tensor_parallel, arguments.device_map is not None
    if launched is not None and (by_matrix or mapped):
        raise ValueError(
            f"an FSDP launch spreads the target by layers: leave {arguments.apart[0]} out, or "
            f"launch with {_DDP}"
        )
    if mapped and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "device_map lays the target over the devices of one process, and this launch has "
            "several: leave it out (shard_target spreads one over them), or start no launcher"
        )
    if arguments.shard_target or by_matrix:
        return launched or Sharding(by_matrix=by_matrix)
    return launched


def launched_sharding() -> Sharding | None:
    """How an FSDP launch wants the target spread; None where it was launched otherwise. Raises
    ValueError: this is a launch of another kind, or the FSDP settings cannot be met."""
    for kind, switch in _OTHERS.items():
        if _is_true(switch):
            raise ValueError(
                f"{kind} would take apart what is trained: launch with "
                f"configs/accelerate/fsdp.yaml, which spreads the target alone, or with {_DDP}"
            )
    if not _is_true(_FSDP):
        return None
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise ValueError(
            f"the target is spread by FSDP2, got fsdp_version {version}: set fsdp_version: 2 in "
            "the launch's fsdp_config"
        )
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    try:
        plugin = FullyShardedDataParallelPlugin()
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"the launch's fsdp_config cannot be read: {type(error).__name__}: {error}: set it as "
            "configs/accelerate/fsdp.yaml does"
        ) from error
    told: Mapping[str, str] = os.environ if _is_true(_SIZES) else {}
    sizes = {
        name: int(told.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    copies, each = sizes.pop("dp_replicate"), sizes.pop("dp_shard")
    processes = int(os.environ.get("WORLD_SIZE", copies * each))
    if copies * each not in (1, processes):
        raise ValueError(
            f"parallelism_config asks for {copies} copies of the target over {each} processes, and "
            f"there are {processes}: set parallelism_config_dp_replicate_size to the number of "
            "nodes, and parallelism_config_dp_shard_size to the processes of one"
        )
    unusable = {
        "fsdp_offload_params": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "fsdp_activation_checkpointing": plugin.activation_checkpointing,
        "fsdp_ignored_modules": plugin.ignored_modules is not None,
        "fsdp_auto_wrap_policy: SIZE_BASED_WRAP": plugin.min_num_params is not None,
        **{f"parallelism_config_{name}_size": size > 1 for name, size in sizes.items()},
    }
    if name := next((name for name, is_set in unusable.items() if is_set), None):
        raise ValueError(
            f"an FSDP launch spreads the frozen target layer by layer, without {name}: leave that "
            "out of the launch's configuration, as configs/accelerate/fsdp.yaml does"
        )
    return Sharding(
        layer_classes=tuple(plugin.transformer_cls_names_to_wrap or ()),
        reshard_after_forward=bool(plugin.reshard_after_forward),
        load_once=plugin.cpu_ram_efficient_loading,
        copies=copies,
    )


@contextmanager
def learning_whole() -> Iterator[None]:
    """Within the block accelerate sees no FSDP launch, so that it leaves what learns in one piece
    and averages its gradients."""
    before = {name: os.environ.pop(name) for name in (_FSDP, _SIZES) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def learns_next(model: Any, processes: int) -> None:
    """What was evaluated before it learns is prepared to learn, too: accelerate would hand it back
    as it prepared it then, and each of several processes would follow gradients of its own."""
    if processes > 1:
        vars(model).pop("_is_accelerate_prepared", None)


def _is_true(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"
