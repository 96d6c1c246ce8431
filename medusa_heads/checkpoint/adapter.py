"""A LoRA adapter inside a target, for heads that were trained together with it.

adapter/adapter_config.json, adapter/adapter_model.safetensors   what peft reads and writes
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.adapter_config import (
    ADAPTER_CONFIG,
    check_adapter_config,
    read_adapter_config,
)
from medusa_heads.checkpoint.tensor_file import tensor_shapes
from medusa_heads.errors import first_line

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

ADAPTER_FOLDER = "adapter"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.[\w.-]+\.lora_[AB]\.weight")


def save_adapter(
    folder: str | os.PathLike[str], adapted: PeftModel, base_model: str, dtype: torch.dtype
) -> None:
    """Write an adapter as peft reads it, and of its configuration what shapes it.

    Raises:
        ValueError: it is no plain LoRA adapter, so that `load_adapter` would refuse it.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = _plain_config(adapted)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in get_peft_model_state_dict(adapted, save_embedding_layers=False).items()
    }
    _check_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, config)
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(describe_adapter(config, base_model), indent=2) + "\n"
    (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")


def describe_adapter(config: Mapping[str, Any], base_model: str | None) -> dict[str, Any]:
    """What `adapter_config.json` says of an adapter with these settings."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        **config,
    }


def _plain_config(adapted: PeftModel) -> dict[str, Any]:
    """The settings of the active adapter, its modules by their names."""
    config = adapted.peft_config[adapted.active_adapter].to_dict()
    if isinstance(config.get("target_modules"), str):  # a pattern, which no file may bring
        config["target_modules"] = _adapted_modules(adapted)
    plain = json.loads(json.dumps(config, default=lambda names: sorted(names)))
    return check_adapter_config(plain | {"task_type": None}, "the adapter's configuration")


def _adapted_modules(adapted: PeftModel) -> list[str]:
    from peft.tuners.lora import LoraLayer

    return [
        name
        for name, module in adapted.get_base_model().named_modules()
        if isinstance(module, LoraLayer)
    ]


def _check_tensors(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> None:
    """Raises ValueError where tensors are none of a plain LoRA adapter, or of one so large."""
    if unknown := sorted(name for name in shapes if not _TENSOR.fullmatch(name)):
        raise ValueError(f"{unknown[0]} is no matrix of a plain LoRA adapter")
    ranks = [shape[0] for name, shape in shapes.items() if shape and ".lora_A." in name]
    asked = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    # peft makes room for what the configuration asks before it looks at the tensors.
    if asked > max(ranks, default=0):
        raise ValueError(f"rank {asked} is asked for, its matrices have {max(ranks, default=0)}")


def read_adapter(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration of a plain LoRA adapter whose matrices lie beside it.

    Raises:
        ValueError: the folder holds no adapter, or one that is no plain LoRA adapter.
    """
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (Path(folder) / name).is_file():
            raise ValueError(
                f"expected the adapter that these heads were trained with at {str(folder)!r}, "
                f"found no {name}: copy the whole checkpoint folder"
            )
    config = read_adapter_config(folder)
    try:
        _check_tensors(tensor_shapes(Path(folder) / ADAPTER_WEIGHTS), config)
    except ValueError as error:
        raise ValueError(f"the adapter {str(folder)!r} cannot be applied: {error}") from error
    return config


def load_adapter(model: PreTrainedModel, folder: str | os.PathLike[str]) -> PeftModel:
    """Put a saved adapter into `model`, whose layers are wrapped in place; it is not trained.

    Raises:
        ValueError: the folder holds no adapter, one that is no plain LoRA adapter, or one that does
            not fit.
    """
    from peft import LoraConfig, PeftModel
    from safetensors import SafetensorError

    config = read_adapter(folder)
    try:
        with quiet_peft():
            adapted: PeftModel = PeftModel.from_pretrained(
                model,
                str(folder),
                # Ours, of what was checked: peft does not read the file.
                config=LoraConfig(task_type="CAUSAL_LM", **config),
                torch_device=str(model.device),
                # In bf16 the adapter computes as the target does. Rounded to fp16 it would no
                # longer be what was saved, and peft then keeps it in fp32.
                autocast_adapter_dtype=model.dtype != torch.bfloat16,
            )
    except (RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = first_line(error)
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
