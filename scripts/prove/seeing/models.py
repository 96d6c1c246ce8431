"""Tiny random models that read images, a kind each, and prompts with an image for them.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from scripts.prove.tiny_models import Widths, random_weights

VOCAB, LONGEST = 160, 512
_IMAGE, _OPENS, _CLOSES, _VIDEO = 150, 151, 152, 153  # tokens
_CHANNELS, _SIDE = 3, 32  # of an image
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": _SIDE,
    "patch_size": 8,
}
_WINDOW: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
}
# Axes of time, height and width, which share the columns of a head.
_AXES: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "mrope_section": [2, 1, 1],
    "partial_rotary_factor": 1.0,
}
_PATCHES: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_NARROW = 0.02, 0.15  # where embeddings are scaled
_GRID = 1, 6, 8  # patches of an image, of which four are a token: 12, in 4 positions
_TOKENS = 12


@dataclass(frozen=True)
class Seeing:
    """A kind of model that reads images.

    Attributes:
        config: what its configuration is made of.
        tokens: that an image takes, in front of which and behind which others may stand.
        given: what the model is given with a prompt [B, T], besides its tokens.
        moves: whether an image takes fewer positions than tokens.
        widths: of matrices that make varied text.
    """

    config: dict[str, Any]
    tokens: Sequence[int]
    given: Callable[[Tensor], dict[str, Any]]
    moves: bool = False
    widths: Widths = (0.3, 0.3)


def _pixels(*shape: int) -> Callable[[Tensor], dict[str, Any]]:
    def given(ids_BT: Tensor) -> dict[str, Any]:
        return {"pixel_values": _random(len(ids_BT), *shape)}

    return given


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _kinds_of(ids_BT: Tensor) -> Tensor:
    return (ids_BT == _IMAGE).long()


def _with_kinds(name: str) -> Callable[[Tensor], dict[str, Any]]:
    return lambda ids_BT: _pixels(_CHANNELS, _SIDE, _SIDE)(ids_BT) | {name: _kinds_of(ids_BT)}


def _in_patches(ids_BT: Tensor) -> dict[str, Any]:
    rows, numbers = len(ids_BT), _CHANNELS * 2 * 4 * 4
    return {
        "pixel_values": _random(rows * _GRID[1] * _GRID[2], numbers),
        "image_grid_thw": torch.tensor([_GRID] * rows),
        "mm_token_type_ids": _kinds_of(ids_BT),
    }


def _turning(vision: dict[str, Any], text: dict[str, Any] | None = None) -> Seeing:
    """Kinds whose positions have three axes."""
    config = {
        "text_config": _TEXT | {"rope_parameters": _AXES} | (text or {}),
        "vision_config": _PATCHES | vision,
        "image_token_id": _IMAGE,
        "video_token_id": _VIDEO,
    }
    return Seeing(config, [_OPENS, *[_IMAGE] * _TOKENS, _CLOSES], _in_patches, moves=True)


def _qwen(vision: dict[str, Any], text: dict[str, Any] | None = None) -> Seeing:
    seeing = _turning(vision, text)
    seeing.config.update(vision_start_token_id=_OPENS, vision_end_token_id=_CLOSES)
    return seeing


def _sized(*shape: int) -> Callable[[Tensor], dict[str, Any]]:
    def given(ids_BT: Tensor) -> dict[str, Any]:
        sizes = torch.tensor([[_SIDE, _SIDE]] * len(ids_BT))
        return _pixels(*shape)(ids_BT) | {"image_sizes": sizes}

    return given


def _smolvlm() -> Seeing:
    text = _TEXT | {"model_type": "llama"}
    config = {"text_config": text, "vision_config": _VISION, "image_token_id": _IMAGE}
    given = _pixels(1, _CHANNELS, _SIDE, _SIDE)
    return Seeing(config | {"scale_factor": 2}, [_IMAGE] * 4, given)


KINDS: dict[str, Callable[[], Seeing]] = {
    "gemma3": lambda: Seeing(
        {
            "text_config": _TEXT | _WINDOW,
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": _IMAGE,
        },
        [_OPENS, *[_IMAGE] * 4, _CLOSES],
        _with_kinds("token_type_ids"),
        widths=_NARROW,
    ),
    "glm4v": lambda: _turning({"image_size": _SIDE}),
    "idefics3": _smolvlm,
    "internvl": lambda: Seeing(
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": _VISION | {"image_size": [_SIDE, _SIDE], "patch_size": [8, 8]},
            "image_token_id": _IMAGE,
            "image_seq_length": 4,
        },
        [_IMAGE] * 4,
        _pixels(_CHANNELS, _SIDE, _SIDE),
    ),
    "llava": lambda: Seeing(
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _VISION | {"model_type": "clip_vision_model"},
            "image_token_index": _IMAGE,
            "image_seq_length": 16,
        },
        [_IMAGE] * 16,
        _pixels(_CHANNELS, _SIDE, _SIDE),
    ),
    "llava_onevision": lambda: Seeing(
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": _VISION
            | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "image_token_index": _IMAGE,
            "image_grid_pinpoints": [[_SIDE, _SIDE]],
        },
        [_IMAGE] * 36,  # of the whole, of its one part, and of four ends of lines
        _sized(2, _CHANNELS, _SIDE, _SIDE),
    ),
    "mistral3": lambda: Seeing(
        {
            "text_config": _TEXT | {"model_type": "mistral"},
            "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8},
            "image_token_index": _IMAGE,
            "spatial_merge_size": 2,
        },
        [_IMAGE] * 4,
        _sized(_CHANNELS, _SIDE, _SIDE),
    ),
    "paligemma": lambda: Seeing(
        {
            "text_config": _TEXT | _WINDOW | {"model_type": "gemma2"},
            "vision_config": _VISION | {"model_type": "siglip_vision_model", "projection_dim": 32},
            "image_token_index": _IMAGE,
            "projection_dim": 32,
        },
        [_IMAGE] * 16,
        lambda ids_BT: (
            _pixels(_CHANNELS, _SIDE, _SIDE)(ids_BT) | {"token_type_ids": torch.zeros_like(ids_BT)}
        ),
        widths=_NARROW,
    ),
    "qwen2_5_vl": lambda: _qwen({"window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen2_vl": lambda: _qwen({"embed_dim": 32, "mlp_ratio": 2}),
    "qwen3_5": lambda: _qwen(
        {"num_position_embeddings": 64, "deepstack_visual_indexes": []},
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "qwen3_vl": lambda: _qwen({"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}),
    "smolvlm": _smolvlm,
}


def build(kind: str) -> Any:
    """A model of this kind, in fp32 and evaluation mode."""
    torch.manual_seed(0)
    seeing = KINDS[kind]()
    config = CONFIG_MAPPING[kind](**seeing.config)
    return random_weights(AutoModelForImageTextToText.from_config(config), seeing.widths)


def prompts(kind: str, rows: int, seed: int, words: int = 12) -> dict[str, Any]:
    """Prompts of one image each, all rows but the first padded on the left; for generate()."""
    seeing, random = KINDS[kind](), torch.Generator().manual_seed(seed)
    words_BT = torch.randint(5, 140, (rows, words), generator=random)
    image_BT = torch.tensor([seeing.tokens] * rows)
    ids_BT = torch.cat([words_BT[:, :6], image_BT, words_BT[:, 6:]], dim=1)
    mask_BT = torch.ones_like(ids_BT)
    for row in range(rows):
        mask_BT[row, : row * 2 % 6] = 0
    ids_BT = ids_BT * mask_BT
    return {"input_ids": ids_BT, "attention_mask": mask_BT} | seeing.given(ids_BT)
