"""A LoRA adapter inside a target, for heads that were trained together with it.

peft's own reader acts on all that stands in `adapter_config.json`: earlier versions imported
modules that were named there, and any version changes the target's own weights where it is told to.
So a stranger's file is never handed to peft: it is of a plain LoRA adapter, or refused by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, write_json
from medusa_heads.checkpoint.tensor_file import mapped_tensors, write_tensors
from medusa_heads.errors import first_line
from medusa_heads.files import read_json
from medusa_heads.masking import shows_secret

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

_TENSOR = re.compile(r"base_model\.model\.[\w.-]+\.lora_[AB]\.weight")
_MODULE = re.compile(r"[\w-]+(\.[\w-]+)*")  # a name; peft would run anything else as a pattern


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_module(value: Any) -> bool:
    return isinstance(value, str) and bool(_MODULE.fullmatch(value)) and not shows_secret(value)


def _are_modules(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_module, value))


def _are_layers(value: Any) -> bool:
    layers = value if isinstance(value, list) else [value]
    return all(isinstance(layer, int) and _is_number(layer) for layer in layers)


def _by_module(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_module(name) and _is_number(number) for name, number in value.items()
    )


# What shapes the adapter: handed to peft.
_SHAPING: Mapping[str, Callable[[Any], bool]] = {
    "r": lambda value: isinstance(value, int) and _is_number(value) and value >= 1,
    "lora_alpha": _is_number,
    "lora_dropout": lambda value: _is_number(value) and value < 1,
    "target_modules": _are_modules,
    "exclude_modules": _are_modules,
    "layers_to_transform": _are_layers,
    "layers_pattern": lambda value: _is_module(value) or _are_modules(value),
    "fan_in_fan_out": _is(bool),
    "use_rslora": _is(bool),
    "rank_pattern": _by_module,
    "alpha_pattern": _by_module,
}
# All that may stand there; the rest describes it, and is read past.
_KNOWN: Mapping[str, Callable[[Any], bool]] = {
    **_SHAPING,
    "peft_type": lambda value: value == "LORA",
    "task_type": lambda value: value == "CAUSAL_LM",
    "bias": lambda value: value == "none",
    "peft_version": _is(str),
    "base_model_name_or_path": _is(str),
    "revision": _is(str),
    "inference_mode": _is(bool),
    "init_lora_weights": lambda value: isinstance(value, bool) or value == "gaussian",
    "megatron_core": lambda value: value == "megatron.core",  # peft writes it and does not use it
    "qalora_group_size": _is_number,  # of what is off
}
_REQUIRED = ("peft_type", "r", "lora_alpha", "target_modules")


def check_adapter_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What of a configuration shapes the adapter, as arguments of peft's `LoraConfig`. Raises
    ValueError: a key or value is not one of a plain LoRA adapter; `where` it stands."""
    for name, value in config.items():
        # Nothing, no, and none at all ask for nothing.
        if value is None or (name not in _KNOWN and value in (False, {}, [])):
            continue
        if name not in _KNOWN:
            raise ValueError(
                f"{where} asks for {name!r}, which is no part of a plain LoRA adapter: heads are "
                "loaded with plain ones alone"
            )
        if not _KNOWN[name](value):
            shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
            raise ValueError(
                f"{where} sets {name!r} to {shown}, which a plain LoRA adapter does not: heads are "
                "loaded with plain ones alone"
            )
    if missing := [name for name in _REQUIRED if config.get(name) is None]:
        raise ValueError(f"{where} does not say {missing[0]!r}: it is damaged")
    return {name: config[name] for name in _SHAPING if config.get(name) is not None}


def describe_adapter(config: Mapping[str, Any], base_model: str | None) -> dict[str, Any]:
    """What `adapter_config.json` says of an adapter with these settings."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        **config,
    }


def save_adapter(
    folder: str | os.PathLike[str], adapted: PeftModel, base_model: str | None, dtype: torch.dtype
) -> None:
    """Write an adapter as peft reads it, and of its configuration what shapes it. Raises
    ValueError: it is no plain LoRA adapter, so that `load_adapter` would refuse it."""
    from peft import get_peft_model_state_dict

    config = _plain_config(adapted)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    # It learns in fp32. In fp16 small numbers are lost, and by its digest it would be another.
    dtype = torch.float32 if dtype == torch.float16 else dtype
    tensors = {name: tensor.detach().to("cpu", dtype) for name, tensor in state.items()}
    _check_tensors(tensors, config)
    write_tensors(folder / ADAPTER_WEIGHTS, tensors)
    write_json(folder / ADAPTER_CONFIG, describe_adapter(config, base_model))


def _plain_config(adapted: PeftModel) -> dict[str, Any]:
    """The settings of the active adapter, its modules by their names."""
    from peft.tuners.lora import LoraLayer

    config = adapted.peft_config[adapted.active_adapter].to_dict()
    if isinstance(config.get("target_modules"), str):  # a pattern, which no file may bring
        modules = adapted.get_base_model().named_modules()
        config["target_modules"] = [name for name, each in modules if isinstance(each, LoraLayer)]
    plain = json.loads(json.dumps(config, default=lambda names: sorted(names)))
    return check_adapter_config(plain | {"task_type": None}, "the adapter's configuration")


def _check_tensors(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Raises ValueError where tensors are none of a plain LoRA adapter, or of one so large."""
    if unknown := sorted(name for name in tensors if not _TENSOR.fullmatch(name)):
        raise ValueError(f"{unknown[0]} is no matrix of a plain LoRA adapter")
    ranks = [len(tensor) for name, tensor in tensors.items() if tensor.ndim and ".lora_A." in name]
    asked = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    # peft makes room for what the configuration asks before it looks at the tensors.
    if asked > max(ranks, default=0):
        raise ValueError(f"rank {asked} is asked for, its matrices have {max(ranks, default=0)}")


def read_adapter(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration of a plain LoRA adapter whose matrices lie beside it. Raises ValueError:
    the folder holds no adapter, or one that is no plain LoRA adapter."""
    folder = Path(folder)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(
                f"expected the adapter that these heads were trained with at {str(folder)!r}, "
                f"found no {name}: copy the whole checkpoint folder"
            )
    path = folder / ADAPTER_CONFIG
    config = check_adapter_config(read_json(path), str(path))
    with _naming(folder):
        _check_tensors(mapped_tensors(folder / ADAPTER_WEIGHTS), config)
    return config


def load_adapter(model: PreTrainedModel, folder: str | os.PathLike[str]) -> PeftModel:
    """Put a saved adapter into `model`, whose layers are wrapped in place; it is not trained.
    Raises ValueError: the folder holds no adapter, one that is no plain LoRA adapter, or one that
    does not fit."""
    from peft import LoraConfig, PeftModel

    config = read_adapter(folder)
    with _naming(folder), quiet_peft():
        adapted: PeftModel = PeftModel.from_pretrained(
            model,
            str(folder),
            # Ours, of what was checked: peft does not read the file.
            config=LoraConfig(task_type="CAUSAL_LM", **config),
            torch_device=str(model.device),
            # In bf16 the adapter computes as the target does. Rounded to fp16 it would no longer
            # be what was saved, and peft then keeps it in fp32.
            autocast_adapter_dtype=model.dtype != torch.bfloat16,
        )
    return adapted


@contextmanager
def _naming(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever does not fit becomes one sentence."""
    from safetensors import SafetensorError

    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = first_line(error)
        raise ValueError(f"the adapter {str(folder)!r} cannot be applied: {reason}") from error


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without the warning that peft asks transformers under a name of the past."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def is_adapted(model: nn.Module) -> bool:
    """Whether an adapter of whatever kind is at work in `model`."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = BaseTunerLayer, AuxiliaryTrainingWrapper
    adapted: Any = [module for module in model.modules() if isinstance(module, kinds)]
    return any(each.active_adapters and not each.disable_adapters for each in adapted)


def adapter_digest(model: nn.Module) -> str | None:
    """sha256 of what the active LoRA adapters in `model` add to it; None where there is none. Taken
    of bf16-rounded matrices, so that it does not depend on the dtype they are loaded in."""
    digest = hashlib.sha256()
    untouched = digest.digest()
    for name, tensor, scaling in _active_matrices(model):
        rounded = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name} {scaling!r} {tuple(tensor.shape)}".encode())
        digest.update(rounded.view(-1).view(torch.uint8).numpy().tobytes())
    return None if digest.digest() == untouched else digest.hexdigest()


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
