"""The embedded target as llama.cpp reads it: a GGUF file, quantised or not."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

TARGET = Path(__file__).parents[2] / "assets" / "demo-target"
_NORMAL, _CONTROL = 1, 3  # kinds of tokens


def write_target(file: Path, kind: str = "F32") -> Path:
    """Write it with matrices of this type: F32, BF16 or Q8_0."""
    config = json.loads((TARGET / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_vocabulary(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    quantised = gguf.GGMLQuantizationType[kind]
    for name, tensor in load_file(TARGET / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs is None:
            continue
        weight = tensor.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = turning_neighbours(weight, config["head_dim"])
        if weight.ndim == 1 or kind == "F32":
            writer.add_tensor(theirs, weight.numpy())
        else:
            raw = gguf.quants.quantize(weight.numpy(), quantised)
            writer.add_tensor(theirs, raw, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def turning_neighbours(weight: Tensor, width: int) -> Tensor:
    """Rows of queries or keys as llama.cpp's Llama turns them: row by row, of every head those
    that turn together side by side."""
    order = [
        first + half * (width // 2) + turn
        for first in range(0, len(weight), width)
        for turn in range(width // 2)
        for half in (0, 1)
    ]
    return weight[torch.tensor(order)]


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    said = json.loads((TARGET / "tokenizer.json").read_text())
    tokens = {number: token for token, number in said["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in said["added_tokens"]}
    tokens |= special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens[number] for number in range(size)])
    writer.add_token_types([_CONTROL if n in special else _NORMAL for n in range(size)])
    merges = said["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
