"""Where a model's numbered layers stand, and what stands behind them.

Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

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
    """The layers of a causal LM's decoder, in order. Raises UnsupportedArchitecture: none or
    several lists could be the layers; and what to do `otherwise`."""
    config = model.config.get_text_config(decoder=True)
    found = list(layer_lists(decoder_of(model)).values())
    if len(found) != 1:
        raise UnsupportedArchitecture(
            f"{config.model_type} has {len(found) or 'no'} lists of {config.num_hidden_layers} "
            "modules that could be its layers, expected one",
            otherwise,
        )
    return list(found[0])


@torch.no_grad()
def behind_layers(model: Any, otherwise: str) -> nn.Sequential:
    """What turns the output [B, T, D] of the last layer into what the lm_head reads [B, T, D], such
    as a final norm; found by a forward of two tokens, whose numbers it must give exactly. Raises
    UnsupportedArchitecture: the layers cannot be found, or it is more than modules that follow one
    another; and what to do `otherwise`."""
    last, lm_head = decoder_layers(model, otherwise)[-1], model.get_output_embeddings()
    inner = set(last.modules())
    decoder = decoder_of(model)
    followers = [
        part
        for part in dict.fromkeys((*decoder.children(), *model.children()))
        if part is not lm_head and inner.isdisjoint(part.modules())
    ]
    ran: list[nn.Module] = []
    seen: dict[str, Any] = {}

    def layer_ran(_module: nn.Module, _args: Any, output: Any) -> None:
        seen["output"] = output[0] if isinstance(output, tuple) else output
        ran.clear()

    def lm_head_reads(_module: nn.Module, args: tuple[Tensor]) -> None:
        seen["read"] = args[0]

    with ExitStack() as hooks:
        hooks.enter_context(last.register_forward_hook(layer_ran))
        hooks.enter_context(lm_head.register_forward_pre_hook(lm_head_reads))
        for part in followers:
            follow = part.register_forward_hook(lambda module, _args, _out: ran.append(module))
            hooks.enter_context(follow)
        model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    found = nn.Sequential(*ran)
    if not torch.equal(found(seen["output"]), seen["read"]):
        raise UnsupportedArchitecture(
            f"{type(model).__name__} does more than apply modules to the output of its last layer "
            "before the lm_head reads it",
            otherwise,
        )
    return found


def decoder_of(model: Any) -> Any:
    """The part that holds the layers; the model itself, where transformers takes something else for
    it, such as ModernBERT's lm_head."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "config") else model
