"""Where a model's numbered layers stand."""

from __future__ import annotations

from typing import Any

from torch import nn


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
