"""A frozen Llama of a given size with random weights: something to measure without a download."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_heads import TargetModel


def random_target(
    size: str, vocabulary: int, *, dtype: str = "float32", device: str | None = None
) -> TargetModel:
    """`size` is WIDTHxLAYERSxHEADS or WIDTHxLAYERSxHEADSxKV_HEADS; embeddings and lm_head are one.

    Raises:
        ValueError: `size` is not of that form, or the heads do not divide the width.
    """
    parts = size.split("x")
    if not 3 <= len(parts) <= 4 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(
            f"expected WIDTHxLAYERSxHEADS or WIDTHxLAYERSxHEADSxKV_HEADS, such as 768x12x12, got "
            f"{size!r}"
        )
    width, layers, heads, *kv_heads = map(int, parts)
    if width % heads or (kv_heads and heads % kv_heads[0]):
        raise ValueError(f"the heads do not divide the width evenly in {size!r}")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads[0] if kv_heads else heads,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    llama: Any = LlamaForCausalLM(config).to(getattr(torch, dtype))
    target = TargetModel(llama.to(device or "cpu"))
    target.freeze()
    return target
