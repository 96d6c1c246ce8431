"""A target loaded for one process, or for each of several: whole on a device, or laid over those
of the process (accelerate's dispatch)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import set_module_tensor_to_device
from transformers import TrainingArguments

from medusa_heads.machine.choice import Choice
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.target import TargetArguments


def load_placed(
    arguments: TargetArguments, args: TrainingArguments, on_choice: Callable[[Choice], object]
) -> TargetModel:
    """The target where its arguments want it; by default on the run's device. One of several
    processes takes it in the dtype it is stored in. Raises ValueError: there is no such target, or
    it cannot lie so."""
    one = args.world_size == 1
    target = TargetModel.from_pretrained(
        arguments.model_name_or_path,
        dtype=arguments.dtype,
        use="batch" if one else None,
        on_choice=on_choice,
        **arguments.source(),
        **arguments.attention(),
        **arguments.placement(args.device, at_once=not one),
    )
    if arguments.device_map is not None:
        _keep_beside(target, args.device)
    return target


def _keep_beside(target: TargetModel, device: torch.device) -> None:
    """Bring what heads read, the lm_head and the token embeddings, to the device where heads learn,
    from wherever it lies; the rest stays."""
    for module in (target.get_input_embeddings(), target.get_output_embeddings()):
        hook = getattr(module, "_hf_hook", None)
        if hook is None:
            continue  # all of the target lies on one device
        values = {
            name: hook.weights_map[name] if tensor.is_meta else tensor
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }
        remove_hook_from_module(module)
        for name, value in values.items():
            set_module_tensor_to_device(module, name, device, value)
        add_hook_to_module(module, AlignDevicesHook(device))
