"""Where a model's numbered layers stand."""

from __future__ import annotations

from typing import Any

from torch import nn

from medusa_heads.errors import UnsupportedArchitecture


def layer_lists(model: Any) -> dict[str, nn.ModuleList]:
    """The lists of as many modules as the configuration counts layers, by name, none of which lies
    within another one."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == count
    }
    inner = {name for name in found for other in found if name.startswith(f"{other}.")}
    return {name: part for name, part in found.items() if name not in inner}


def decoder_layers(model: Any, otherwise: str) -> list[nn.Module]:
    """The layers of a causal LM's decoder, in order.

    Raises:
        UnsupportedArchitecture: none or several lists could be the layers; and what to do
            `otherwise`.
    """
    config = model.config.get_text_config(decoder=True)
    found = list(layer_lists(model.get_decoder() or model).values())
    if len(found) != 1:
        raise UnsupportedArchitecture(
            f"{config.model_type} has {len(found) or 'no'} lists of {config.num_hidden_layers} "
            "modules that could be its layers, expected one",
            otherwise,
        )
    return list(found[0])
