"""What generate() has prepared for a text: whatever would be ignored, or read in another way than
transformers reads it, is refused.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from medusa_heads.cache_names import CACHE_NAMES
from medusa_heads.inference.engine.given.cache import held_tokens
from medusa_heads.inference.engine.given.media import is_said

_READ_HERE = (
    "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep",
    *CACHE_NAMES, "output_attentions", "output_hidden_states",
)  # fmt: skip


def refuse_unsupported(
    config: GenerationConfig,
    own: GenerationConfig,
    model_kwargs: dict[str, Any],
    with_prompt: Collection[str] = (),
) -> None:
    """Refuse by name what would otherwise be ignored in silence, which is not read with the prompt
    alone."""
    refused, of_target = _asked(config, own), _asked(own, own)
    # What the model would read in every forward, but is not handed on with a tree.
    for name, value in model_kwargs.items():
        if name not in _READ_HERE and name not in with_prompt and is_said(value):
            refused.append(name)
    if refused:
        there = "" if set(refused) - set(of_target) else " of the target's generation_config"
        raise ValueError(
            f"tree decoding does not support {', '.join(refused)}: leave it out{there}, or call "
            "the target's own generate()"
        )


def _asked(config: GenerationConfig, own: GenerationConfig) -> list[str]:
    """What of it a configuration asks for, beside the target's own."""
    refusals = {
        "num_beams > 1": (config.num_beams or 1) > 1,
        # Training turns it off, and fine-tuned models are saved so.
        "use_cache=False": config.use_cache is False and own.use_cache is not False,
        "output_attentions=True": bool(config.output_attentions),
        "output_hidden_states=True": bool(config.output_hidden_states),
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        f"cache_implementation={config.cache_implementation!r}": config.cache_implementation
        not in (None, "dynamic", "dynamic_full"),
        "assistant_early_exit": config.assistant_early_exit is not None,
        "use_mtp=True": bool(getattr(config, "use_mtp", False)),
        "penalty_alpha": getattr(config, "penalty_alpha", None) is not None,
        "dola_layers": getattr(config, "dola_layers", None) is not None,
        "force_words_ids": getattr(config, "force_words_ids", None) is not None,
        "constraints": getattr(config, "constraints", None) is not None,
    }
    return [name for name, asked in refusals.items() if asked]


def limited(config: GenerationConfig, criteria: StoppingCriteriaList | None) -> GenerationConfig:
    """The same, with the length at which the text ends: generate() takes a caller's criterion in
    place of its own, whatever length is announced."""
    own = [each for each in criteria or [] if type(each) is MaxLengthCriteria]
    limits = [int(each.max_length) for each in own]
    if not limits or min(limits) == config.max_length:
        return config
    config = copy.copy(config)
    config.max_length = min(limits)
    return config


def on_device(input_ids_BT: Tensor, model_kwargs: dict[str, Any], device: torch.device) -> Tensor:
    """What generate() was given, where the target is: transformers only warns of another place."""
    if device.type == "meta":  # until a forward fetches its weights
        return input_ids_BT
    for name in _READ_HERE:
        if isinstance(given := model_kwargs.get(name), Tensor):
            model_kwargs[name] = given.to(device)
    return input_ids_BT.to(device)


def check_tokens(input_ids_BT: Tensor, readable: int | None) -> None:
    """Raises ValueError: there is no token, or one that a target with so many, where that
    is known, cannot read. On a GPU that would end the process."""
    if not input_ids_BT.numel():
        raise ValueError(
            "input_ids must have a row for each text, and tokens in it, got none: "
            f"{list(input_ids_BT.shape)}"
        )
    least, most = map(int, input_ids_BT.aminmax())
    if readable is not None and (least < 0 or most >= readable):
        raise ValueError(
            f"the target has {readable} tokens, and the text has token ids from {least} to {most}: "
            "tokenise with the target's own tokenizer, and give the target as many embeddings as "
            "that has tokens"
        )


def left_padding(
    input_ids_BT: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> list[int]:
    """Padded slots at the left of each row. Raises ValueError: the mask is not one of these
    tokens."""
    rows, tokens = input_ids_BT.shape
    given: Tensor | None = model_kwargs.get("attention_mask")
    if given is not None and given.ndim == 2 and given.shape[0] == 1:  # of all rows
        model_kwargs["attention_mask"] = given = given.expand(rows, -1)
    # transformers leaves out a mask of nothing but ones, and keeps how wide it was.
    width = getattr(config, "_mask_length", tokens)
    shape = [rows, width] if given is None else list(given.shape)
    if shape != [rows, tokens]:
        whole = (
            " and pass the whole text, not only what is new" if held_tokens(model_kwargs) else ""
        )
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {[rows, tokens]}, got {shape}: make "
            f"it for these tokens{whole}"
        )
    if given is None:
        return [0] * rows
    mask_BT = given.bool()
    padding_B = (~mask_BT).sum(dim=1)
    if (mask_BT[:, 1:] < mask_BT[:, :-1]).any() or (padding_B == tokens).any():
        raise ValueError(
            "attention_mask must be 0 only on the left of a row: pad with padding_side='left', and "
            "pass the mask, in place of which generate() leaves out all pad tokens"
        )
    return padding_B.tolist()


def check_positions(input_ids_BT: Tensor, padding: list[int], model_kwargs: dict[str, Any]) -> None:
    """Positions of text that generate() makes itself pass; others would be forgotten after the
    prompt. Models that read images have several for each token, [.., B, T], which are one in text.
    Raises ValueError: they are others."""
    given: Tensor | None = model_kwargs.get("position_ids")
    if given is None:
        return
    rows, tokens = input_ids_BT.shape
    *_, of_rows, width = 0, *given.shape
    if width != tokens:  # beside a cache generate() makes more for a model that takes no mask
        tokens += held_tokens(model_kwargs)
    if given.ndim not in (2, 3) or width != tokens or of_rows not in (1, rows):
        raise ValueError(
            f"position_ids must have the shape of input_ids, {list(input_ids_BT.shape)}, got "
            f"{list(given.shape)}: leave them out, and make attention_mask of that shape"
        )
    positions_T = torch.arange(given.shape[-1], device=given.device)
    own_BT = positions_T - torch.tensor(padding, device=given.device)[:, None]
    if ((given != own_BT) & (own_BT >= 0)).any():
        raise ValueError(
            "tree decoding counts positions from the first token of the text: leave position_ids "
            "out, or call the target's own generate()"
        )
