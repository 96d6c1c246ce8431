"""A LoRA adapter inside a target, for heads that were trained together with it.

adapter/adapter_config.json, adapter/adapter_model.safetensors   what peft reads and writes
"""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

ADAPTER_FOLDER = "adapter"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def save_adapter(
    folder: str | os.PathLike[str], adapted: PeftModel, base_model: str, dtype: torch.dtype
) -> None:
    """Write an adapter as peft reads it, without the form of a model card that peft would add."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in get_peft_model_state_dict(adapted, save_embedding_layers=False).items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(adapted.peft_config[adapted.active_adapter])
    config.inference_mode = True
    config.base_model_name_or_path = base_model
    config.save_pretrained(str(folder))


def load_adapter(model: PreTrainedModel, folder: str | os.PathLike[str]) -> PeftModel:
    """Put a saved adapter into `model`, whose layers are wrapped in place; it is not trained.

    Raises:
        ValueError: the folder holds no adapter, or one that does not fit.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (Path(folder) / name).is_file():
            raise ValueError(
                f"expected the adapter that these heads were trained with at {str(folder)!r}, "
                f"found no {name}: copy the whole checkpoint folder"
            )
    try:
        with quiet_peft():
            adapted: PeftModel = PeftModel.from_pretrained(
                model,
                str(folder),
                torch_device=str(model.device),
                # In bf16 the adapter computes as the target does. Rounded to fp16 it would no
                # longer be what was saved, and peft then keeps it in fp32.
                autocast_adapter_dtype=model.dtype != torch.bfloat16,
            )
    except (RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"the adapter {str(folder)!r} cannot be applied: {reason}") from error
    return adapted


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without the warning that peft asks transformers under a name of the past."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def adapter_digest(model: nn.Module) -> str | None:
    """sha256 of what the active LoRA adapters in `model` add to it; None where there is none.

    Taken of bf16-rounded matrices, so that it does not depend on the dtype they are loaded in.
    """
    digest, found = hashlib.sha256(), False
    for name, tensor, scaling in _active_matrices(model):
        found = True
        rounded = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name} {scaling!r} {tuple(tensor.shape)}".encode())
        digest.update(rounded.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if found else None


def _active_matrices(model: nn.Module) -> Iterator[tuple[str, Tensor, float]]:
    """Name, matrix and factor of every matrix of the active LoRA adapters, in order of names."""
    from peft.tuners.lora import LoraLayer

    for name, module in sorted(model.named_modules()):
        if not isinstance(module, LoraLayer) or module.disable_adapters:
            continue
        for adapter in module.active_adapters:
            for part in ("lora_A", "lora_B"):
                matrices = getattr(module, part)
                if adapter in matrices:
                    scaling = float(module.scaling[adapter])
                    yield f"{name}.{part}", matrices[adapter].weight, scaling
