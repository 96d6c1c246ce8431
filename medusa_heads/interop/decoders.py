"""What the checkpoints of EAGLE-3, DFlash and DSpark have in common: layers, a reduced vocabulary,
and the configuration that speculators puts around them.

`d2t` holds, for each token that can be drafted, how far the target's id lies above its own; `t2d`
which of the target's tokens these are.

Shapes: D hidden, V vocabulary, C tokens that can be drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS, StoredHeads, expected_shapes
from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import LayerShape
from medusa_heads.interop.source import Source

STEPS = 5  # read where a checkpoint does not say how many
BESIDE = ("d2t", "t2d", "embed_tokens.weight")
_POSITIONS = 131072


def vocabulary_tensors(stored: StoredHeads, matrix_VD: Tensor | None) -> dict[str, Tensor]:
    """A reduced vocabulary, and of `matrix_VD`, the target's vocabulary matrix where it is wanted,
    the rows that can be drafted."""
    drafted_C, tensors = stored.tensors.get(DRAFT_TOKENS), dict[str, Tensor]()
    if matrix_VD is not None:
        tensors["lm_head.weight"] = matrix_VD if drafted_C is None else matrix_VD[drafted_C]
    if drafted_C is not None:
        assert stored.config.vocab_size is not None
        tensors["d2t"] = drafted_C - torch.arange(len(drafted_C))
        tensors["t2d"] = torch.zeros(stored.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][drafted_C] = True
    return tensors


def layer_settings(
    config: HeadsConfig, shape: LayerShape, model_type: str, num_layers: int = 1
) -> dict[str, Any]:
    """The layers as transformers' configurations say them."""
    return {
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        **{part.name: getattr(shape, part.name) for part in fields(LayerShape)},
        "rope_parameters": dict(shape.rope_parameters),
        "rope_theta": shape.rope_parameters.get("rope_theta"),
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": False,
    }


def speculators_config(
    stored: StoredHeads, algorithm: str, layers: Mapping[str, Any], said: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json as speculators writes it, and as vLLM reads that."""
    config = stored.config
    method = {"proposal_type": "greedy", "speculative_tokens": config.num_heads}
    return {
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": stored.target.get("name_or_path"), "architectures": []},
        },
        "transformer_layer_config": dict(layers),
        "draft_vocab_size": config.num_candidates,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        **said,
    }


def layers_said(source: Source) -> dict[str, Any]:
    """The layers' settings: those of the whole, or in speculators' files a part of them. Raises
    ValueError: their MLP is none that layers here have."""
    said = source.config.get("transformer_layer_config", source.config)
    if not isinstance(said, dict):
        raise ValueError(f"{source.name!r} holds a layer of {said!r}, which is no configuration")
    if said.get("hidden_act", "silu") != "silu" or said.get("mlp_bias"):
        raise ValueError(
            f"{source.name!r} holds a layer whose MLP has biases or is not of silu: heads here "
            "hold Llama's and Qwen3's"
        )
    return said


def shape_said(said: Mapping[str, Any], query_rows: int) -> dict[str, Any]:
    """Of a LayerShape, as settings say it; `query_rows` are those of a query matrix. Raises
    ValueError: positions that are no object."""
    heads, rope = said.get("num_attention_heads"), said.get("rope_parameters")
    rope = rope or said.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: rope_parameters must be an object, got {rope!r}")
    rope = {"rope_theta": said.get("rope_theta") or 10_000.0} | rope
    rope.setdefault("rope_type", rope.pop("type", "default"))
    width = said.get("head_dim")
    if width is None and isinstance(heads, int) and heads > 0:
        width = query_rows // heads
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": said.get("num_key_value_heads", heads),
        "head_dim": width,
        "intermediate_size": said.get("intermediate_size"),
        "rms_norm_eps": said.get("rms_norm_eps", 1e-6),
        "attention_bias": said.get("attention_bias", False),
        "rope_parameters": rope,
    }


def matrix_shape(source: Source, name: str) -> tuple[int, int]:
    """Of a tensor. Raises ValueError: there is none, or it is no matrix."""
    if name not in source.files:
        raise ValueError(f"{source.name!r} lacks {name}: download it anew")
    shape = source.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{source.name!r}: {name} has shape {list(shape)}, not a matrix")
    return shape[0], shape[1]


def check_width(source: Source, said: Mapping[str, Any], hidden_size: int) -> None:
    """Raises ValueError: heads, or a target, of another width than their tensors have."""
    for wide in ("target_hidden_size", "hidden_size"):
        claimed = source.config.get(wide) or said.get(wide) or hidden_size
        if claimed != hidden_size:
            raise ValueError(
                f"{source.name!r} says {wide}: {claimed!r} and its tensors are {hidden_size} wide: "
                "heads here are as wide as their target"
            )


def layer_ids(source: Source, ids: Any, example: str) -> list[int]:
    """Numbers of the target's layers. Raises ValueError: they are none, and what to add."""
    if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
        raise ValueError(
            f"{source.name!r} does not say which layers it reads: add {example} to its config.json"
        )
    return ids


def steps_said(source: Source, notices: list[str]) -> Any:
    """How many tokens a checkpoint drafts."""
    try:
        return source.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        notices.append(f"how far it drafts is not said: {STEPS} steps are taken")
        return STEPS


def read_tensors(
    source: Source, config: HeadsConfig, names: Mapping[str, str], whole: str, notices: list[str]
) -> dict[str, Tensor]:
    """The heads' tensors by our names, of which `names` gives theirs. Raises ValueError: one is
    missing, surplus or ill-fitting, or no part of the `whole`."""
    expected = expected_shapes(config)
    if expected.pop(DRAFT_TOKENS, None) is not None and "d2t" not in source.files:
        raise ValueError(f"{source.name!r} lacks d2t of its reduced vocabulary: download it anew")
    if missing := sorted(set(expected) - set(names)):
        raise ValueError(f"{source.name!r} lacks {missing[0]} of its layers: download it anew")
    if surplus := sorted(set(names) - set(expected)):
        raise ValueError(f"{source.name!r}: {names[surplus[0]]} is no tensor of {whole}")
    for name, wanted in expected.items():
        if source.shape(names[name]) != wanted:
            raise ValueError(
                f"{source.name!r}: {names[name]} has shape {list(source.shape(names[name]))}, "
                f"expected {list(wanted)}"
            )
    tensors = {ours: source.read(theirs) for ours, theirs in names.items()}
    if config.draft_vocab_size is not None:
        tensors[DRAFT_TOKENS] = _tokens(source, config)
    if "embed_tokens.weight" in source.files:
        notices.append("its copy of the token embeddings is left out: the target's own are read")
    return tensors


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


def one_of_said(said: Sequence[Mapping[str, Any]], *keys: str) -> Any:
    """The first value that any of the configurations gives for any of the keys."""
    found = (of[key] for key in keys for of in said if of.get(key) is not None)
    return next(found, None)
