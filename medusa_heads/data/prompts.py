"""Prompts of unlike lengths as one batch, and the tokens at which their texts end.

Shapes: B prompts, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor


def stop_ids(model: Any) -> tuple[int, ...]:
    """The tokens at which a model's generate() stops."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def until_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """Tokens up to the first that ends a text, and with it: padding stands behind."""
    length = next((n for n, token in enumerate(tokens, start=1) if token in ends), len(tokens))
    return list(tokens[:length])


def pad_id(model: Any) -> int:
    """A token to pad texts with: the model's own for it, or else one that ends its texts. Models
    name tokens that they do not have, such as -1, or one that only their tokenizer has."""
    pad = model.generation_config.pad_token_id
    known = range(model.config.get_text_config(decoder=True).vocab_size)
    return int(pad) if pad in known else next((end for end in stop_ids(model) if end in known), 0)


def lacks_template(text: str | None, tokenizer: Any) -> bool:
    """Whether a text is none that the tokenizer's chat template has rendered, though it has one."""
    marks = [token for token in tokenizer.all_special_tokens if len(token) > 1]
    return bool(tokenizer.chat_template) and not any(mark in (text or "") for mark in marks)


def left_padded(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both [B, T]."""
    longest = max(map(len, prompts))
    missing = [longest - len(prompt) for prompt in prompts]
    ids = [[pad] * n + list(prompt) for n, prompt in zip(missing, prompts, strict=True)]
    mask = [[0] * n + [1] * (longest - n) for n in missing]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
