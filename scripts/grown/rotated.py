"""A grown Llama in a random basis: the same logits, and no channel of its stream is empty.

What grows by zeros leaves most channels without anything, as no trained model does. Here the norms'
weights go into the matrices behind them, and then the stream is turned by a random orthogonal
matrix, which an RMSNorm that weighs all channels alike does not notice (Ashkboos et al. 2024,
"SliceGPT", arXiv:2401.15024, section 3). The hidden states that heads read have a mean square of 1
over all channels.

Shapes: D channels, O rows, I columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from scripts.grown.shape import Placement


@torch.no_grad()
def rotate(model: LlamaForCausalLM, place: Placement, seed: int) -> None:
    """Turn a model that `grow_llama` made, in place; its configuration remembers the seed.

    Raises:
        ValueError: its vocabulary grew.
    """
    if place.constant:
        raise ValueError(
            "a rotated target keeps its vocabulary: whatever heads learn would reach the channel "
            "that keeps new tokens from being written"
        )
    width = place.large.hidden_size
    turn_DD = random_basis(width, seed).to(model.device)
    inner: Any = model.model
    _turn_rows(inner.embed_tokens.weight, turn_DD)
    for layer in inner.layers:
        attention, mlp = layer.self_attn, layer.mlp
        reading = (attention.q_proj, attention.k_proj, attention.v_proj)
        _fold(layer.input_layernorm, reading, place)
        _fold(layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj), place)
        for module in (*reading, mlp.gate_proj, mlp.up_proj):
            _turn_rows(module.weight, turn_DD)
        for module in (attention.o_proj, mlp.down_proj):
            _turn_columns(module, turn_DD)
    _fold(inner.norm, (model.lm_head,), place)
    _turn_rows(model.lm_head.weight, turn_DD)
    model.config.grown_from["rotated_with_seed"] = seed


def random_basis(width: int, seed: int) -> Tensor:
    """An orthogonal matrix [D, D], drawn evenly from all of them."""
    generator = torch.Generator().manual_seed(seed)
    normal_DD = torch.randn(width, width, generator=generator, dtype=torch.float64)
    turn_DD, upper_DD = torch.linalg.qr(normal_DD)
    return (turn_DD * upper_DD.diagonal().sign()).float()  # else the signs would not be even


def _fold(norm: Any, readers: Iterable[nn.Linear], place: Placement) -> None:
    """Weigh channels in the matrices behind a norm; what read new channels reads nothing now."""
    weight_D = norm.weight.float()
    weight_D[place.small.hidden_size :] = 0
    for reader in readers:
        reader.weight.copy_(reader.weight.float() * weight_D)
    norm.weight.fill_(1)


def _turn_rows(matrix_OD: Tensor, turn_DD: Tensor) -> None:
    """A matrix whose rows are read from the stream, or laid into it."""
    matrix_OD.copy_(matrix_OD.float() @ turn_DD)


def _turn_columns(writer: nn.Linear, turn_DD: Tensor) -> None:
    """A matrix [D, I] whose products are added to the stream, and its bias."""
    writer.weight.copy_(turn_DD.T @ writer.weight.float())
    if writer.bias is not None:
        writer.bias.copy_(writer.bias.float() @ turn_DD)
