"""A tiny configuration for every causal-LM type that transformers knows.

Most types share a vocabulary of settings, so one table of small values, cut down to the fields that
a configuration class has, builds most of them. Lists with an entry for every layer are shortened
from the class's own defaults, one layer of each kind kept. What a type wants beyond that stands in
FIXTURES. Windows, chunks and the floors of scales by position are small, so that every tree
straddles their edges.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 199
LAYERS = 4
POSITIONS = 512
WINDOW = 16

_VALUES: list[tuple[Any, str]] = [
    (VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (
        POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length "
        "max_target_positions position_bias_max_distance prefix_length "
        "original_max_position_embeddings",
    ),
    (
        64,
        "hidden_size d_model n_embd emb_dim word_embed_proj_dim embedding_size "
        "input_embedding_size output_embedding_size backbone_hidden_size kv_dim mamba_d_ssm "
        "lru_width o_lora_rank attention_hidden_size",
    ),
    (
        96,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff dim_ff d_inner "
        "feed_forward_size ffn_hidden_size intermediate_size_mlp dense_intermediate_size",
    ),
    (
        48,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "expert_ffn_hidden_size shared_experts_intermediate_size "
        "moe_shared_expert_intermediate_size",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
        "num_decoder_layers num_encoder_layers depth",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads attention_heads num_decoder_attention_heads "
        "num_encoder_attention_heads swa_num_attention_heads linear_num_value_heads "
        "linear_num_heads num_experts n_routed_experts num_local_experts moe_num_experts "
        "hc_lowrank d_rel zero_expert_num",
    ),
    (
        2,
        "num_key_value_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok "
        "moe_k moe_topk encoder_layerdrop_layers altup_num_inputs o_groups mamba_expand "
        "num_kv_shared_layers",
    ),
    (
        16,
        "head_dim v_head_dim qk_nope_head_dim swa_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim index_head_dim kv_channels dim_head "
        "attention_head_size query_pre_attn_scalar hidden_size_per_layer_input mamba_d_head "
        "mamba_head_dim mamba_d_state ssm_state_size state_size global_head_dim "
        "mamba_d_conv_heads index_n_heads",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_chunk_size window_size local_attention "
        "attention_window_size keep_window_size chunk_size mamba_chunk_size "
        "local_attention_window_len block_size floor_scale log_scaling_n_floor",
    ),
    (
        8,
        "qk_rope_head_dim rotary_dim laurel_rank mamba_n_heads mamba_num_heads "
        "router_hidden_size index_topk adapter_rank gated_norm_rank",
    ),
    (32, "q_lora_rank kv_lora_rank rel_extent"),
    (1, "n_group topk_group first_k_dense_replace num_dense_layers n_groups"),
    (0, "num_mtp_layers num_nextn_predict_layers pad_token_id"),
    (None, "eos_token_id bos_token_id sep_token_id cls_token_id decoder_start_token_id"),
    (True, "is_decoder use_cache"),
    (False, "tie_word_embeddings is_encoder_decoder use_mamba_kernels"),
]
SMALL: dict[str, Any] = {name: value for value, names in _VALUES for name in names.split()}

_ALL_HEADS_CACHED: dict[str, Any] = {"num_key_value_heads": 4}  # latent attention shares no heads
_MIXED: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2)}
_QWEN: dict[str, Any] = {**_MIXED, "use_sliding_window": True, "sliding_window": WINDOW}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER: dict[str, Any] = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_DOTS: dict[str, Any] = _ALL_HEADS_CACHED | {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
FIXTURES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
            *("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "minicpm3", "sarvam_mla", "youtu"),
        ],
        _ALL_HEADS_CACHED,
    ),
    "blt": {"encoder_hash_byte_group_vocab": 99},
    "cohere_compass_text": {
        **_MIXED,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v4": {
        "layer_types": [
            *("sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"),
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "doge": {"keep_window_size": WINDOW},
    "dots1": {**_MIXED, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS,
    "falcon_h1": {"mamba_d_head": 8},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model"}},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        }
    },
    "gemma4_unified_assistant": {
        "text_config": {
            "model_type": "gemma4_unified_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        }
    },
    "got_ocr2": {"text_config": {"model_type": "qwen2"}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": _MIXED,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {**_ALL_HEADS_CACHED, "head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mellum": _MIXED,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 8,
        "index_topk_blocks": 3,
    },
    "moshi": {"audio_vocab_size": VOCAB},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"}},
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32]},
    "smollm3": _QWEN,
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},  # twice the width
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of that type whose model has some 100,000 parameters.

    Raises:
        Exception: whatever the configuration class objects to.
    """
    kind = CONFIG_MAPPING[model_type]
    config = kind(**_settings(kind, FIXTURES.get(model_type, {})))
    # With tied embeddings random text sticks to one token; not every class takes it as a setting.
    config.tie_word_embeddings = False
    config.get_text_config(decoder=True).tie_word_embeddings = False
    return config


def _settings(kind: type[PreTrainedConfig], fixture: dict[str, Any]) -> dict[str, Any]:
    settings = {
        field.name: SMALL[field.name]
        for field in dataclasses.fields(kind)
        if field.name in SMALL and (SMALL[field.name] is not None or "None" in str(field.type))
    }
    for name, sub_kind in getattr(kind, "sub_configs", {}).items():
        mine = dict(fixture.get(name) or {})
        if sub_kind is AutoConfig and "model_type" in mine:
            sub_kind = CONFIG_MAPPING[mine["model_type"]]
        if sub_kind is not AutoConfig:
            settings[name] = _settings(sub_kind, mine) | mine
    settings |= _per_layer(kind, settings)
    settings |= {name: v for name, v in fixture.items() if name not in kind.sub_configs}
    return settings


def _per_layer(kind: type[PreTrainedConfig], settings: dict[str, Any]) -> dict[str, Any]:
    """The class's default lists of one entry a layer, shortened to the layers there are."""
    try:
        default = kind()
    except Exception:
        return {}
    full = vars(default).get("num_hidden_layers")
    shortened = {}
    for field in dataclasses.fields(kind):
        value = vars(default).get(field.name)
        if isinstance(value, list | tuple) and len(value) == full and full:
            # In order of first appearance, so that what comes first (a dense layer) stays first.
            kinds = list(dict.fromkeys(value))
            shortened[field.name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
    return shortened
