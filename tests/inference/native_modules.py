"""Checkpoints of tiny targets with multi-token-prediction modules, laid out as released ones are.

The modules are planted: each is the target's last layer, and reads tokens alone. Where the target's
other layers add little, such a module nearly always names the target's next token: all it misses is
the beginning of the text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, modeling_layers

from medusa_heads.target.target import TargetModel
from scripts.prove.tiny_configs import tiny_config
from scripts.prove.tiny_models import random_weights
from tests.conftest import DEVICE

needs_modules = pytest.mark.skipif(
    not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"),
    reason="transformers before 5.20 runs no multi-token-prediction modules",
)
LAYERS = 2
_LINEAR = ["linear_attention", "full_attention", "full_attention"]
_SLIDING = ["sliding_attention"] * 3
# How many modules each has here, what its layers are, and what its configuration says of modules.
KINDS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3": (2, {"first_k_dense_replace": 0}, {"num_nextn_predict_layers": 2}),
    "glm4_moe": (1, {"first_k_dense_replace": 0}, {"num_nextn_predict_layers": 1}),
    "mellum": (
        1,
        {"layer_types": _SLIDING, "mlp_layer_types": ["sparse"] * 3},
        {"num_nextn_predict_layers": 1},
    ),
    "qwen3_next": (1, {"layer_types": _LINEAR}, {}),
    "qwen3_5_text": (1, {"layer_types": _LINEAR}, {"mtp_num_hidden_layers": 1}),
}
TREES = ("deepseek_v3", "glm4_moe", "mellum")  # whose targets verify trees
_NUMBERED = ("deepseek_v3", "glm4_moe")  # modules are layers behind the last one


def write_checkpoint(kind: str, folder: Path, *, right: bool = True) -> Path:
    """A target in fp32 with its modules; they know nothing where they are not `right`."""
    number, layers, modules = KINDS[kind]
    config = tiny_config(kind)
    longer = {"num_hidden_layers": LAYERS + number, **dict.fromkeys(modules, 0)}
    config = type(config)(**(config.to_dict() | longer | layers))
    torch.manual_seed(0)
    model = random_weights(AutoModelForCausalLM.from_config(config), (0.15, 0.15))
    _prepare(model, right=right)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    rename = _behind_layers if kind in _NUMBERED else _under_their_name
    weights = rename(load_file(path), number, config.hidden_size)
    save_file(weights, path, metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    stored |= {"num_hidden_layers": LAYERS, **modules}
    stored |= {
        name: types[:LAYERS] for name, types in stored.items() if name in _BY_LAYER and types
    }
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


def read_target(folder: Path) -> TargetModel:
    """The target of such a checkpoint, as commands load it."""
    view = TargetModel.from_pretrained(str(folder), dtype=torch.float32, device=DEVICE)
    view.model.generation_config.eos_token_id = None
    view.model.generation_config.pad_token_id = 0
    return view


def with_tokenizer(folder: Path) -> Path:
    """The checkpoint, with a word for each of its tokens: `w3`, `w4`, ..."""
    words = {f"w{i}": i for i in range(read_target(folder).vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


_BY_LAYER = ("layer_types", "mlp_layer_types")


@torch.no_grad()
def _prepare(model: Any, *, right: bool) -> None:
    """Let the first layer add little, and the modules' layers be what the last one is."""
    embeddings, layers = model.get_input_embeddings().weight, model.get_decoder().layers
    embeddings /= embeddings.pow(2).mean(dim=1, keepdim=True).sqrt()
    for name, parameter in layers[0].named_parameters():
        if re.search(r"o_proj|out_proj|down_proj", name):
            parameter *= 0.01
    for module in layers[LAYERS:] if right else ():
        module.load_state_dict(layers[LAYERS - 1].state_dict())


def _behind_layers(weights: dict[str, Tensor], number: int, width: int) -> dict[str, Tensor]:
    """As in DeepSeek V3 and GLM 4.5."""
    for layer in range(LAYERS, LAYERS + number):
        own = f"model.layers.{layer}."
        weights |= {own + name: torch.ones(width) for name in ("enorm.weight", "hnorm.weight")}
        weights[own + "eh_proj.weight"] = torch.eye(width, 2 * width)
        weights[own + "shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    return weights


def _under_their_name(weights: dict[str, Tensor], number: int, width: int) -> dict[str, Tensor]:
    """As in Qwen3-Next, Qwen3.5 and Mellum."""
    behind = {f"model.layers.{LAYERS + k}.": f"mtp.layers.{k}." for k in range(number)}
    for before, after in behind.items():
        weights = {name.replace(before, after): tensor for name, tensor in weights.items()}
    norm = weights["model.norm.weight"]
    one = torch.ones_like(norm) * norm.mean().round()  # Qwen's norms add 1 to what is stored
    weights |= {f"mtp.pre_fc_norm_{of}.weight": one.clone() for of in ("embedding", "hidden")}
    weights["mtp.fc.weight"] = torch.eye(width, 2 * width)
    weights["mtp.norm.weight"] = norm.clone()
    return weights
