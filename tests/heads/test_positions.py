"""Positions of the heads' own layers: as transformers turns them, and without a word of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from medusa_heads.decoder_shape import BlockShape, DecoderShape, LayerShape
from medusa_heads.heads.decoder import settings_of

RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 7.0, "original_max_position_embeddings": 4096},  # warned of once a process
}
CLASSES: list[tuple[type[LayerShape], Any, Any]] = [
    (DecoderShape, LlamaConfig, LlamaRotaryEmbedding),
    (BlockShape, Qwen3Config, Qwen3RotaryEmbedding),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("classes", CLASSES, ids=["llama", "qwen3"])
def test_positions_are_turned_as_their_rule_says_and_nothing_is_warned_of(
    classes: tuple[type[LayerShape], Any, Any], rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    of_shape, of_config, of_rotary = classes
    rope = {"rope_type": rule, "rope_theta": 5e5} | RULES[rule]
    shape = of_shape(4, 2, 16, 96, rope_parameters=rope)
    logger = logging.getLogger("transformers")  # which hands nothing on to others
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, logger="transformers"):
            config, rotary = settings_of(shape, of_config, of_rotary, 64)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
    plain = of_rotary(of_config(hidden_size=64, head_dim=16, rope_parameters=dict(rope)))
    assert torch.equal(rotary.inv_freq, plain.inv_freq)
    assert rotary.attention_scaling == plain.attention_scaling
    assert config.rope_parameters == rope == shape.rope_parameters


def test_a_length_beyond_all_numbers_is_no_error() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 1e300}
    rope |= {"original_max_position_embeddings": 10**400}
    config = DecoderShape(4, 2, 16, 96, rope_parameters=rope)
    with pytest.raises(ValueError, match="say no positions"):
        settings_of(config, LlamaConfig, LlamaRotaryEmbedding, 64)
