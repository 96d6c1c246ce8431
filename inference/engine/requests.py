"""What a call of generate() asks of the engine: what it refuses, and what it reads of it.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

_READ_HERE = ("attention_mask", "position_ids", "cache_position")


def refuse_unsupported(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse by name what would otherwise be ignored in silence."""
    refusals = {
        "num_beams > 1": (config.num_beams or 1) > 1,
        "use_cache=False": config.use_cache is False,
        "output_attentions=True": bool(config.output_attentions),
        "output_hidden_states=True": bool(config.output_hidden_states),
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        f"cache_implementation={config.cache_implementation!r}": config.cache_implementation
        not in (None, "dynamic", "dynamic_full"),
        "penalty_alpha": getattr(config, "penalty_alpha", None) is not None,
        "dola_layers": getattr(config, "dola_layers", None) is not None,
    }
    refused = [name for name, asked in refusals.items() if asked]
    # What the model would read in every forward, but is not handed on with a tree.
    for name, value in model_kwargs.items():
        if isinstance(value, Tensor) and name not in _READ_HERE:
            refused.append(name)
    if refused:
        raise ValueError(
            f"tree decoding does not support {', '.join(refused)}: leave it out, or call the "
            "target's own generate()"
        )


def left_padding(input_ids_BT: Tensor, attention_mask_BT: Tensor | None) -> list[int]:
    """Padded slots at the left of each row."""
    if attention_mask_BT is None:
        return [0] * input_ids_BT.shape[0]
    mask_BT = attention_mask_BT.bool()
    padding_B = (~mask_BT).sum(dim=1)
    if (mask_BT[:, 1:] < mask_BT[:, :-1]).any() or (padding_B == mask_BT.shape[1]).any():
        raise ValueError(
            "attention_mask must be 0 only on the left of a row: pad with padding_side='left'"
        )
    return padding_B.tolist()


def check_positions(position_ids_BT: Tensor | None, padding: list[int]) -> None:
    """Positions that generate() makes itself pass; others would be forgotten after the prompt."""
    if position_ids_BT is None:
        return
    positions_T = torch.arange(position_ids_BT.shape[-1], device=position_ids_BT.device)
    padding_B1 = torch.tensor(padding, device=position_ids_BT.device)[:, None]
    own_BT = positions_T - padding_B1
    if position_ids_BT.ndim != 2 or ((position_ids_BT != own_BT) & (own_BT >= 0)).any():
        raise ValueError(
            "tree decoding counts positions from the first token of the text: leave position_ids "
            "out, or call the target's own generate()"
        )
