"""What config.json says of a drafter's layers, in EAGLE-3's, DFlash's and DSpark's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medusa_heads.config import MOST_STEPS
from medusa_heads.interop.source import Source

STEPS = 5  # read where a checkpoint does not say how many


def layers_said(source: Source) -> dict[str, Any]:
    """The layers' settings: those of the whole, or in speculators' files a part of them. Raises
    ValueError: their MLP is none that layers here have."""
    said = source.config.get("transformer_layer_config", source.config)
    if not isinstance(said, dict):
        raise ValueError(f"{source.name!r} holds a layer of {said!r}, which is no configuration")
    if one_of_said((said,), "hidden_act") not in (None, "silu") or said.get("mlp_bias"):
        raise ValueError(
            f"{source.name!r} holds a layer whose MLP has biases or is not of silu: heads here "
            "hold Llama's and Qwen3's"
        )
    return said


def has_windows(said: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a layer sees a part of the text alone: as its kind says, or as configurations of Qwen
    fill in what that is."""
    if kinds := one_of_said(said, "layer_types"):
        return not isinstance(kinds, list) or set(map(str, kinds)) != {"full_attention"}
    first, layers = (one_of_said(said, key) for key in ("max_window_layers", "num_hidden_layers"))
    above = type(first) is int and type(layers) is int and first >= layers
    used = one_of_said(said, "use_sliding_window") and one_of_said(said, "sliding_window")
    return bool(used) and not above


def shape_said(said: Mapping[str, Any], query_rows: int) -> dict[str, Any]:
    """Of a LayerShape, as settings say it; `query_rows` are those of a query matrix. What they say
    to be null is what they do not say. Raises ValueError: positions that are no object, or that
    differ by layer."""
    said = {key: value for key, value in said.items() if value is not None}
    heads, whole = said.get("num_attention_heads"), said.get("rope_parameters") or {}
    rope = said.get("rope_scaling") or whole  # the former first, as transformers reads them
    if not isinstance(rope, dict) or not isinstance(whole, dict):
        raise ValueError(f"config.json: rope_parameters must be an object, got {rope!r}")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(
            f"config.json: rope_parameters say positions of {nested[0]!r} alone, and all layers "
            "here have the same"
        )
    # Of text alone the three positions of multimodal drafters are one.
    rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = said.get("rope_theta", whole.get("rope_theta") or 10_000.0)
    if "partial_rotary_factor" in said:
        rope.setdefault("partial_rotary_factor", said["partial_rotary_factor"])
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    if rope["rope_type"] in ("llama3", "yarn"):
        key = "original_max_position_embeddings"
        if key in said:  # outside of the rope's own it goes before them, as transformers reads it
            rope[key] = said[key]
        elif said.get("max_position_embeddings"):
            rope.setdefault(key, said["max_position_embeddings"])
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


def steps_said(source: Source, notices: list[str]) -> int:
    """How many tokens a checkpoint drafts. Raises ValueError: no number that layers can draft."""
    try:
        steps = source.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        notices.append(f"how far it drafts is not said: {STEPS} steps are taken")
        return STEPS
    return number_said("speculative_tokens", steps, 1, MOST_STEPS)


def number_said(key: str, said: Any, least: int, most: int) -> int:
    """Raises ValueError: what config.json says is no number within bounds."""
    if type(said) is not int or not least <= said <= most:
        raise ValueError(
            f"config.json: {key} must be an integer from {least} to {most}, got {said!r}"
        )
    return said


def one_of_said(said: Sequence[Mapping[str, Any]], *keys: str) -> Any:
    """The first value that any of the configurations gives for any of the keys."""
    found = (of[key] for key in keys for of in said if of.get(key) is not None)
    return next(found, None)
