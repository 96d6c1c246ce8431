"""Heads as llama.cpp reads a drafter: one GGUF file, with the vocabulary of the target's own.

llama.cpp counts layers by what goes into them. Its eagle3 layer turns neighbouring columns of
queries and keys by the position, as its Llama does, where transformers turns columns half a head
apart.

Shapes: D hidden, V vocabulary, H attention heads, W their width.
Source: llama.cpp, docs/speculative.md and its own converter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.stored_heads import StoredHeads
from medusa_heads.decoder_shape import BlockShape, DecoderShape, LayerShape
from medusa_heads.interop import block, eagle3
from medusa_heads.interop.gguf_target import TargetFile, library

_FEATURES = 3  # that llama.cpp reads for an eagle3 layer, no more and no fewer
_LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.(.+)\.weight")
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BESIDE = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
}
_OF_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_MASK = "tokenizer.ggml.mask_token_id"
_CONTEXT = 131072


def check_fits(stored: StoredHeads) -> None:
    """Raises ValueError, by name, for what llama.cpp cannot hold of eagle3 and block heads."""
    config, shape = stored.config, stored.config.decoder
    features, positions = config.features or (), "default"
    if shape is not None:
        positions = shape.rope_parameters["rope_type"]
        if shape.attention_bias:
            raise ValueError("llama.cpp holds no biases in the attention of heads")
        if said := [name for name in _OF_YARN if shape.rope_parameters.get(name) is not None]:
            raise ValueError(f"llama.cpp's file holds no {said[0]} of the positions of heads")
    if positions == "llama3" and config.kind == "block":
        raise ValueError(
            "llama.cpp turns positions of block heads by the rules default, linear and yarn, and "
            "these heads' turn by llama3"
        )
    if config.kind == "block":
        return
    if len(features) != _FEATURES:
        raise ValueError(
            f"llama.cpp holds eagle3 layers that read {_FEATURES} layers of the target, and these "
            f"read {len(features)}: train with features of {_FEATURES}"
        )
    assert shape is None or isinstance(shape, DecoderShape)
    if shape is None or shape.feature_norm == "each":
        raise ValueError(
            "llama.cpp holds no norm for each feature (fc_norm): train with feature_norm all"
        )
    if shape.norm_output:
        raise ValueError(
            "llama.cpp knows no norm_output, and would draft badly: train without norm_output"
        )


def write(
    folder: Path, stored: StoredHeads, matrix_VD: Callable[[], Tensor], target: TargetFile
) -> tuple[Path, str]:
    """Write the drafter, and return its file and what llama.cpp calls the way it drafts.
    `matrix_VD` gives the target's vocabulary matrix, of which heads of a reduced vocabulary that
    share it are given a copy; of a whole one llama.cpp reads the target's own. Raises OSError: it
    cannot be written."""
    config = stored.config
    assert config.hidden_size is not None
    partly = config.vocab_matrix == "shared" and config.draft_vocab_size is not None
    copied_VD = matrix_VD() if partly else None
    if config.kind == "block":
        (tensors, said), kind = block.written(stored, copied_VD), "dflash"
        algorithm = "dflash" if config.correction_rank is None else "dspark"
    else:
        (tensors, said), kind = eagle3.written(stored, copied_VD), "eagle3"
        algorithm = "eagle3"
    shape = config.decoder
    assert isinstance(shape, LayerShape)
    gguf = library()
    dtype = tensors["fc.weight"].dtype
    type_name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    file = folder / f"{algorithm}-{type_name}.gguf"
    writer = gguf.GGUFWriter(file, kind)
    writer.add_file_type(
        gguf.LlamaFileType[f"{'ALL' if type_name == 'F32' else 'MOSTLY'}_{type_name}"]
    )
    _add_sizes(writer, config.hidden_size, config.num_layers, shape)
    writer.add_vocab_size(config.vocab_size)
    if isinstance(shape, BlockShape):
        layers = said["aux_hidden_state_layer_ids"]
        writer.add_uint32(f"{kind}.block_size", said["block_size"])
        writer.add_bool(f"{kind}.sample_from_anchor", said["sample_from_anchor"])
        writer.add_bool(f"{kind}.has_confidence_head", False)
        writer.add_bool(f"{kind}.attention.causal", False)
    else:
        layers = said["eagle_aux_hidden_state_layer_ids"]
        writer.add_uint32(f"{kind}.target_hidden_size", config.hidden_size)
        writer.add_bool(f"{kind}.norm_before_residual", said["norm_before_residual"])
        writer.add_bool(f"{kind}.norm_before_fc", said["norm_before_fc"])
    writer.add_array(f"{kind}.target_layers", layers)
    for name, (value, types) in target.vocabulary.items():
        if name != _MASK:
            writer.add_key_value(name, value, types[0], types[1] if len(types) > 1 else None)
    if isinstance(shape, BlockShape):
        writer.add_uint32(_MASK, shape.mask_token_id)
    for name, tensor in tensors.items():
        if name != "t2d":
            _add_tensor(gguf, writer, name, tensor, shape)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        if error.errno is not None:
            raise
        # Of numpy, which says how many numbers were written alone.
        raise OSError(
            f"{file} cannot be written to its end ({error}): is the disk full?"
        ) from error
    finally:
        writer.close()
    return file, f"draft-{algorithm}"


def _add_sizes(writer: Any, hidden_size: int, num_layers: int, shape: LayerShape) -> None:
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(hidden_size)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_dimension_count(shape.head_dim)
    _add_positions(writer, hidden_size, shape)


def _add_positions(writer: Any, hidden_size: int, shape: LayerShape) -> None:
    from gguf import RopeScalingType
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = shape.rope_parameters
    theta = float(rope.get("rope_theta") or 10_000.0)
    writer.add_rope_freq_base(theta)
    if rope["rope_type"] == "llama3":  # by what each frequency is divided
        turns = LlamaRotaryEmbedding(shape.layer_config(LlamaConfig, hidden_size)).inv_freq
        plain = theta ** -(torch.arange(len(turns)) / len(turns))
        writer.add_tensor("rope_freqs.weight", (plain / turns).numpy())
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(float(rope["factor"]))
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_tensor(gguf: Any, writer: Any, name: str, tensor: Tensor, shape: LayerShape) -> None:
    if name == "d2t":  # which token each one that can be drafted is
        writer.add_tensor(name, (tensor + torch.arange(len(tensor))).numpy())
        return
    found = _LAYER.fullmatch(name)
    theirs = _BESIDE[name] if found is None else f"blk.{found[1] or 0}.{_OF_LAYER[found[2]]}.weight"
    if isinstance(shape, DecoderShape) and name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = _neighbours(tensor, shape.head_dim)
    if tensor.ndim == 1:  # norms
        tensor = tensor.float()
    if tensor.dtype == torch.bfloat16:  # which numpy has not
        raw = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(theirs, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        return
    writer.add_tensor(theirs, tensor.contiguous().numpy())


def _neighbours(weight: Tensor, width: int) -> Tensor:
    """Rows of queries or keys [H * W, ..] in the order in which neighbours turn together."""
    halves = weight.unflatten(0, (-1, 2, width // 2))
    return halves.transpose(1, 2).reshape(weight.shape)
