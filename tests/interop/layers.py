"""Decoder layers of other projects, built key by key from what their layouts say: EAGLE-3, DFlash
and DSpark. Sizes: D 64 hidden, V 199 vocabulary, as the tiny targets have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.interop.layouts import D, V, values, write_config

HEADS, GROUPS, WIDTH, WIDE, FEW, RANK, BLOCK, MASK = 4, 2, 16, 96, 30, 6, 4, 11
Tensors = dict[str, Tensor]


def _matrices(layer: str, read: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's, whose attention reads so many columns."""
    return {
        f"{layer}.self_attn.q_proj.weight": (HEADS * WIDTH, read),
        f"{layer}.self_attn.k_proj.weight": (GROUPS * WIDTH, read),
        f"{layer}.self_attn.v_proj.weight": (GROUPS * WIDTH, read),
        f"{layer}.self_attn.o_proj.weight": (D, HEADS * WIDTH),
        f"{layer}.mlp.gate_proj.weight": (WIDE, D),
        f"{layer}.mlp.up_proj.weight": (WIDE, D),
        f"{layer}.mlp.down_proj.weight": (D, WIDE),
    }


def eagle3(num_features: int, layer: str = "midlayer", *, reduced: bool = True) -> Tensors:
    """Every tensor different, under the names of the authors' files."""
    shapes = _matrices(layer, 2 * D) | {
        "lm_head.weight": (FEW if reduced else V, D),
    }
    if num_features:
        shapes["fc.weight"] = (D, num_features * D)
    tensors = {name: 3 * values(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    norms = [f"{layer}.{n}" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    for i, name in enumerate([*norms, "norm"]):
        tensors[f"{name}.weight"] = 1 + values(D, seed=100 + i)
    if reduced:
        drafted = torch.arange(3, 3 + 5 * FEW, 5)
        tensors["d2t"] = drafted - torch.arange(FEW)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool)
        tensors["t2d"][drafted] = True
    return tensors


def eagle3_config(**changed: Any) -> dict[str, Any]:
    said = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": D,
        "intermediate_size": WIDE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": V,
        "draft_vocab_size": FEW,
        "eagle_aux_hidden_state_layer_ids": [1, 2],
    }
    return said | changed


def speculators_eagle3(steps: int) -> dict[str, Any]:
    """What speculators says differently."""
    method = {"proposal_type": "greedy", "speculative_tokens": steps}
    return {
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": [method]},
        "transformer_layer_config": eagle3_config(),
        "rope_theta": None,
    }


def block(*, reduced: bool = False, corrected: bool = True, layers: int = 2) -> Tensors:
    """Every tensor different, under the names of the authors' files."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, 2 * D)}
    norms = {"hidden_norm": D, "norm": D}
    for layer in (f"layers.{i}" for i in range(layers)):
        shapes |= _matrices(layer, D)
        norms |= {f"{layer}.self_attn.{name}": WIDTH for name in ("q_norm", "k_norm")}
        norms |= {f"{layer}.{name}": D for name in ("input_layernorm", "post_attention_layernorm")}
    if corrected:
        drafted = FEW if reduced else V
        shapes["markov_head.markov_w1.weight"] = (V, RANK)
        shapes["markov_head.markov_w2.weight"] = (drafted, RANK)
    if reduced:
        shapes["lm_head.weight"] = (FEW, D)
    tensors = {name: 3 * values(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    for i, (name, width) in enumerate(norms.items()):
        tensors[f"{name}.weight"] = 1 + values(width, seed=100 + i)
    if reduced:
        drafted_C = torch.arange(3, 3 + 5 * FEW, 5)
        tensors["d2t"] = drafted_C - torch.arange(FEW)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool)
        tensors["t2d"][drafted_C] = True
    return tensors


LAYERS = {
    "model_type": "qwen3",
    "hidden_size": D,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": WIDTH,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": V,
}


def speculators(algorithm: str, *, anchor: bool, **changed: Any) -> dict[str, Any]:
    """config.json as speculators writes it."""
    method = {"proposal_type": "greedy", "speculative_tokens": BLOCK - (not anchor)}
    verifier: dict[str, Any] = {"name_or_path": None, "architectures": []}
    said = {
        "speculators_model_type": algorithm,
        "speculators_config": {"proposal_methods": [method], "verifier": verifier},
        "transformer_layer_config": LAYERS,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [1, 2],
        "mask_token_id": MASK,
        "sample_from_anchor": anchor,
    }
    return said | changed


_PLAIN = {**LAYERS, "block_size": BLOCK}
PLAIN_DFLASH = _PLAIN | {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]}}
PLAIN_DSPARK = _PLAIN | {"mask_token_id": MASK, "target_layer_ids": [0, 1], "markov_rank": RANK}


def written(folder: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> Path:
    write_config(folder, said)
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


PUBLISHED: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "eagle3": (eagle3(2), eagle3_config()),
    "dspark": (block(reduced=True), speculators("dspark", anchor=True)),
    "dflash": (block(corrected=False), PLAIN_DFLASH | {"architectures": ["DFlashDraftModel"]}),
}
"""What lies in a folder of each: tensors and config.json."""
