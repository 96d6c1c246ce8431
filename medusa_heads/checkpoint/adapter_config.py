"""What an adapter's configuration may say.

peft's own reader acts on all that stands in `adapter_config.json`: earlier versions imported
modules that were named there, and any version changes the target's own weights where it is told
to. So a stranger's file is never handed to peft: it describes a plain LoRA adapter, or is refused
by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from medusa_heads.files import read_json
from medusa_heads.masking import shows_secret

ADAPTER_CONFIG = "adapter_config.json"
_MODULE = re.compile(r"[\w-]+(\.[\w-]+)*")  # a name; peft would run anything else as a pattern


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 1


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
    "r": _is_rank,
    "lora_alpha": _is_number,
    "lora_dropout": lambda value: _is_number(value) and value < 1,
    "target_modules": _are_modules,
    "exclude_modules": _are_modules,
    "layers_to_transform": _are_layers,
    "layers_pattern": lambda value: _is_module(value) or _are_modules(value),
    "fan_in_fan_out": _is_bool,
    "use_rslora": _is_bool,
    "rank_pattern": _by_module,
    "alpha_pattern": _by_module,
}
# What describes it, and is read past.
_DESCRIBING: Mapping[str, Callable[[Any], bool]] = {
    "peft_type": lambda value: value == "LORA",
    "task_type": lambda value: value == "CAUSAL_LM",
    "bias": lambda value: value == "none",
    "peft_version": lambda value: isinstance(value, str),
    "base_model_name_or_path": lambda value: isinstance(value, str),
    "revision": lambda value: isinstance(value, str),
    "inference_mode": _is_bool,
    "init_lora_weights": lambda value: _is_bool(value) or value == "gaussian",
    "megatron_core": lambda value: value == "megatron.core",  # peft writes it and does not use it
    "qalora_group_size": _is_number,  # of what is off
}
_REQUIRED = ("peft_type", "r", "lora_alpha", "target_modules")


def read_adapter_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration of a plain LoRA adapter, as arguments of peft's `LoraConfig`.

    Raises:
        ValueError: there is none, it is damaged, or it asks for anything but a plain LoRA adapter.
    """
    path = Path(folder) / ADAPTER_CONFIG
    return check_adapter_config(read_json(path), str(path))


def check_adapter_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What of a configuration shapes the adapter.

    Args:
        config: what the file holds.
        where: it stands, for the sentence.

    Raises:
        ValueError: a key or value is not one of a plain LoRA adapter.
    """
    known = {**_SHAPING, **_DESCRIBING}
    for name, value in config.items():
        # Nothing, no, and none at all ask for nothing.
        if value is None or (name not in known and value in (False, {}, [])):
            continue
        if name not in known:
            raise ValueError(
                f"{where} asks for {name!r}, which is no part of a plain LoRA adapter: heads are "
                "loaded with plain ones alone"
            )
        if not known[name](value):
            raise ValueError(
                f"{where} sets {name!r} to {_shortened(value)}, which a plain LoRA adapter does "
                "not: heads are loaded with plain ones alone"
            )
    if missing := [name for name in _REQUIRED if config.get(name) is None]:
        raise ValueError(f"{where} does not say {missing[0]!r}: it is damaged")
    return {name: config[name] for name in _SHAPING if config.get(name) is not None}


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
