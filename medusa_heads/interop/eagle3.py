"""EAGLE-3's checkpoints, as vLLM, SGLang and speculators read and write them: one decoder layer.

`d2t` holds, for each token that can be drafted, how far the target's id lies above its own; `t2d`
which of the target's tokens these are. Layers are counted there by what goes into them, here, and
in `eagle_config`, by what comes out.

Shapes: D hidden, V vocabulary, C tokens that can be drafted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS, StoredHeads, expected_shapes
from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.interop.source import Source

ARCHITECTURE = "LlamaForCausalLMEagle3"
MARK = r"(midlayer|layers\.0)\.self_attn\.q_proj\.weight"
STEPS = 5  # read where a checkpoint does not say how many
_POSITIONS = 131072
_LAYER = re.compile(r"(midlayer|layers\.0)\.")
_BESIDE = ("d2t", "t2d", "embed_tokens.weight")
_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")


def written(
    stored: StoredHeads, matrix_VD: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and config.json of eagle3 heads. `matrix_VD` is the target's vocabulary matrix,
    where the heads share it: a copy of its rows is theirs there."""
    config = stored.config
    assert config.hidden_size is not None and config.vocab_size is not None
    shape = config.decoder or DecoderShape.of_width(config.hidden_size)
    tensors = {
        name.removeprefix("decoder."): tensor
        for name, tensor in stored.tensors.items()
        if name != DRAFT_TOKENS
    }
    drafted_C = stored.tensors.get(DRAFT_TOKENS)
    if matrix_VD is not None:
        tensors["lm_head.weight"] = matrix_VD if drafted_C is None else matrix_VD[drafted_C]
    if drafted_C is not None:
        tensors["d2t"] = drafted_C - torch.arange(len(drafted_C))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][drafted_C] = True
    layers = list(config.features or ())
    eagle_config: dict[str, Any] = {"use_aux_hidden_state": bool(layers)}
    said: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.num_candidates,
        **{name: getattr(shape, name) for name in _SIZES},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": shape.attention_bias,
        "rope_parameters": dict(shape.rope_parameters),
        "rope_theta": shape.rope_parameters.get("rope_theta"),
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": False,
        "norm_before_residual": shape.norm_before_residual,
        "dtype": str(tensors["norm.weight"].dtype).removeprefix("torch."),
        "eagle_config": eagle_config,
    }
    if layers:
        eagle_config["eagle_aux_hidden_state_layer_ids"] = layers
        said |= {
            "num_aux_hidden_states": len(layers),
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
            "norm_before_fc": shape.feature_norm == "all",
            "fc_norm": shape.feature_norm == "each",
        }
    return tensors, said


def read(
    source: Source, target_vocab: int | None
) -> tuple[HeadsConfig, dict[str, Tensor], list[str]]:
    """Heads under our names, and what the user should know; `target_vocab`: rows of the target's
    lm_head, where it is known. Raises ValueError: a layer of another kind, or a tensor or setting
    that is missing, surplus or ill-fitting."""
    top, said, notices = source.config, _layer_config(source), list[str]()
    names = {_ours(name): name for name in source.files if name not in _BESIDE}
    for name in (
        "lm_head.weight",
        "decoder.norm.weight",
        "decoder.midlayer.self_attn.q_proj.weight",
    ):
        if name not in names:
            raise ValueError(f"{source.name!r} lacks {name}: download it anew")
    matrix = source.shape(names["lm_head.weight"])
    if len(matrix) != 2 or 0 in matrix:
        raise ValueError(f"{source.name!r}: lm_head.weight has shape {list(matrix)}, not a matrix")
    drafted, hidden_size = matrix
    for wide in ("target_hidden_size", "hidden_size"):
        claimed = top.get(wide) or said.get(wide) or hidden_size
        if claimed != hidden_size:
            raise ValueError(
                f"{source.name!r} says {wide}: {claimed!r} and its lm_head is {hidden_size} wide: "
                "heads here are as wide as their target"
            )
    if said.get("norm_output") or top.get("norm_output"):
        raise ValueError(
            f"{source.name!r} reads its own output behind the last norm (norm_output): heads here "
            "read it before"
        )
    vocab_size = target_vocab or said.get("vocab_size")
    reduced = "d2t" in source.files
    if reduced and vocab_size is None:
        raise ValueError(f"{source.name!r} does not say its target's vocab_size: give the target")
    features = _features(source, names, notices)
    config = HeadsConfig(
        kind="eagle3",
        num_heads=_steps(top, notices),
        vocab_matrix="own",
        draft_vocab_size=drafted if reduced else None,
        features=features,
        decoder=_shape(source, said, names),
        hidden_size=hidden_size,
        vocab_size=vocab_size if reduced else drafted,
    )
    expected = expected_shapes(config)
    if reduced:
        del expected[DRAFT_TOKENS]
    if missing := sorted(set(expected) - set(names)):
        raise ValueError(f"{source.name!r} lacks {missing[0]} of its layer: download it anew")
    if surplus := sorted(set(names) - set(expected)):
        raise ValueError(
            f"{source.name!r}: {names[surplus[0]]} is no tensor of EAGLE-3's one layer"
        )
    for name, wanted in expected.items():
        if source.shape(names[name]) != wanted:
            raise ValueError(
                f"{source.name!r}: {names[name]} has shape {list(source.shape(names[name]))}, "
                f"expected {list(wanted)}"
            )
    tensors = {ours: source.read(theirs) for ours, theirs in names.items()}
    if reduced:
        tensors[DRAFT_TOKENS] = _tokens(source, config)
    if "embed_tokens.weight" in source.files:
        notices.append("its copy of the token embeddings is left out: the target's own are read")
    return config, tensors, notices


def _ours(theirs: str) -> str:
    if theirs == "lm_head.weight":
        return theirs
    return "decoder." + _LAYER.sub("midlayer.", theirs, count=1)


def _layer_config(source: Source) -> dict[str, Any]:
    """The layer's settings: those of the whole, or in speculators' files a part of them."""
    said = source.config.get("transformer_layer_config", source.config)
    if not isinstance(said, dict) or said.get("model_type", "llama") != "llama":
        kind = said.get("model_type") if isinstance(said, dict) else said
        raise ValueError(f"{source.name!r} holds a layer of {kind!r}: heads here hold Llama's")
    if said.get("hidden_act", "silu") != "silu" or said.get("mlp_bias"):
        raise ValueError(
            f"{source.name!r} holds a layer whose MLP has biases or is not of silu: heads here "
            "hold Llama's"
        )
    return said


def _shape(source: Source, said: Mapping[str, Any], names: Mapping[str, str]) -> DecoderShape:
    top, heads = source.config, said.get("num_attention_heads")
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: rope_parameters must be an object, got {rope!r}")
    rope = {"rope_theta": said.get("rope_theta") or 10_000.0} | rope
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rows = source.shape(names["decoder.midlayer.self_attn.q_proj.weight"])[0]
    width = said.get("head_dim")
    if width is None and isinstance(heads, int) and heads > 0:
        width = rows // heads
    # speculators' own default differs from that of the files that vLLM reads.
    before = top.get("norm_before_residual", "speculators_model_type" in top)
    norm = "each" if _true(top, "fc_norm") else "all" if _true(top, "norm_before_fc") else "none"
    return DecoderShape.from_dict(
        {
            "num_attention_heads": heads,
            "num_key_value_heads": said.get("num_key_value_heads", heads),
            "head_dim": width,
            "intermediate_size": said.get("intermediate_size"),
            "rms_norm_eps": said.get("rms_norm_eps", 1e-6),
            "attention_bias": said.get("attention_bias", False),
            "norm_before_residual": before,
            "feature_norm": norm,
            "rope_parameters": rope,
        }
    )


def _true(said: Mapping[str, Any], name: str) -> bool:
    return bool(said.get(name, False))


def _features(source: Source, names: Mapping[str, str], notices: list[str]) -> list[int] | None:
    """The layers whose outputs are read; None for the last hidden state alone."""
    eagle_config = source.config.get("eagle_config") or {}
    if not isinstance(eagle_config, dict):
        raise ValueError(f"config.json: eagle_config must be an object, got {eagle_config!r}")
    if not eagle_config.get("use_aux_hidden_state", True):
        return None
    into = source.config.get("eagle_aux_hidden_state_layer_ids")
    out_of = eagle_config.get("eagle_aux_hidden_state_layer_ids")
    ids = into or out_of
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise ValueError(
            f"{source.name!r} does not say which layers it reads: add "
            "eagle_aux_hidden_state_layer_ids to its config.json, for a target of L layers by "
            "default [2, L // 2, L - 3]"
        )
    if not into:
        notices.append(f"eagle_config's layers {ids} are taken for those whose outputs are read")
    return [number - 1 for number in ids] if into else ids


def _steps(top: Mapping[str, Any], notices: list[str]) -> int:
    try:
        steps = top["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        notices.append(f"how far it drafts is not said: {STEPS} steps are taken")
        return STEPS
    return steps


def _tokens(source: Source, config: HeadsConfig) -> Tensor:
    above_C = source.read("d2t")
    assert config.vocab_size is not None
    whole = above_C.dtype == torch.long and above_C.shape == (config.num_candidates,)
    tokens_C = above_C + torch.arange(config.num_candidates) if whole else above_C
    if not whole or tokens_C[0] < 0 or tokens_C[-1] >= config.vocab_size:
        whole = False
    if not whole or bool((tokens_C.diff() <= 0).any()):
        raise ValueError(
            f"{source.name!r}: d2t must say of {config.num_candidates} tokens, in ascending order, "
            f"how far their ids among {config.vocab_size} lie above their own"
        )
    return tokens_C
