"""EAGLE-3's checkpoints, as vLLM, SGLang and speculators read and write them: one decoder layer.

Layers are counted there by what goes into them, here, and in `eagle_config`, by what comes out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS, StoredHeads
from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.interop.decoders import (
    agree,
    check_width,
    layer_ids,
    layer_settings,
    matrix_shape,
    read_tensors,
    speculators_config,
    vocabulary_size,
    vocabulary_tensors,
)
from medusa_heads.interop.said import has_windows, layers_said, one_of_said, shape_said, steps_said
from medusa_heads.interop.source import Source

ARCHITECTURE = "LlamaForCausalLMEagle3"
MARK = r"midlayer\..*|layers\.0\.hidden_norm\.weight"
# What SpecForge's files may say of the target's layers; theirs is Llama's.
_LIKE_LLAMA = (None, "llama", "phi3", "qwen2")
_OTHERS = {
    r".*\.kv_[ab]_.*": "a layer with latent attention (MLA)",
    r".*\.[qk]_norm\.weight": "a layer with norms of queries and keys, as Qwen3's",
    r"mask_hidden": "a layer that drafts all tokens at once (P-EAGLE)",
    r"parallel_draft_heads\..*": "a layer with Medusa heads behind it",
}
# SGLang's earlier names of the norms of three features.
_EARLIER = {
    f"aux_norm_{place}.weight": f"fc_norm.{i}.weight"
    for i, place in enumerate(("low", "mid", "high"))
}
# Targets of which SGLang 0.5.23 takes eagle_config's layers for those whose inputs are read, unless
# the first is 1; of all others it takes them for those whose outputs are read.
_BY_INPUTS = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
)
_NORMS = {  # of ModelOpt's settings, those of other layers
    "use_mtp_layernorm": True,
    "use_last_layernorm": False,
    "use_input_layernorm_in_first_layer": False,
}


def written(
    stored: StoredHeads, matrix_VD: Tensor | None, *, speculators: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and config.json of eagle3 heads, in the authors' layout or in `speculators`'.
    `matrix_VD` is the target's vocabulary matrix, where the heads share it: a copy of its rows is
    theirs there."""
    config = stored.config
    assert config.hidden_size is not None
    shape = config.decoder or DecoderShape.of_width(config.hidden_size)
    assert isinstance(shape, DecoderShape)
    layer = "layers.0." if speculators else "midlayer."
    tensors = {
        _theirs(name, layer): tensor
        for name, tensor in stored.tensors.items()
        if name != DRAFT_TOKENS
    } | vocabulary_tensors(stored, matrix_VD)
    features = list(config.features or ())
    layers = layer_settings(config, shape, "llama")
    if config.logit_scale != 1:
        layers["logit_scale"] = config.logit_scale
    said: dict[str, Any] = {
        "norm_before_residual": shape.norm_before_residual,
        "norm_output": shape.norm_output,
        "dtype": str(tensors["norm.weight"].dtype).removeprefix("torch."),
    }
    if features:
        said |= {
            "eagle_aux_hidden_state_layer_ids": [number + 1 for number in features],
            "norm_before_fc": shape.feature_norm == "all",
            "fc_norm": shape.feature_norm == "each",
        }
    if speculators:
        said["architectures"] = ["Eagle3Speculator"]
        return tensors, speculators_config(stored, "eagle3", layers, said)
    eagle_config: dict[str, Any] = {"use_aux_hidden_state": bool(features)}
    if features:
        more = features[0] > 1 and stored.target.get("model_type") in _BY_INPUTS
        eagle_config["eagle_aux_hidden_state_layer_ids"] = [number + more for number in features]
        said["num_aux_hidden_states"] = len(features)
    return tensors, {
        "architectures": [ARCHITECTURE],
        "target_hidden_size": config.hidden_size,
        "draft_vocab_size": config.num_candidates,
        **layers,
        **said,
        "eagle_config": eagle_config,
    }


def misread_by_sglang(stored: StoredHeads) -> str | None:
    """Why SGLang 0.5.23 drafts badly with heads that are written in the authors' layout, though it
    does not say so; None where nothing is known to be amiss."""
    config, features = stored.config, stored.config.features or ()
    shape = config.decoder
    if shape is None or (isinstance(shape, DecoderShape) and shape.norm_before_residual):
        return (
            "it knows no norm_before_residual, and adds the layer's output to what was not "
            "normalised"
        )
    if len(features) == 1:
        return "it leaves out fc.weight of a single feature"
    if features[:1] == (0,) and stored.target.get("model_type") in _BY_INPUTS:
        return "it can be told to read no output of layer 0 of such a target"
    return None


def read(
    source: Source, target_vocab: int | None, num_layers: int | None = None
) -> tuple[HeadsConfig, dict[str, Tensor], list[str]]:
    """Heads under our names, and what the user should know; `target_vocab`: rows of the target's
    lm_head, `num_layers`: its layers, where they are known. Raises ValueError: a layer of another
    kind, or a tensor or setting that is missing, surplus or ill-fitting."""
    source.call(_EARLIER)
    top, layers, notices = source.config, layers_said(source), list[str]()
    nested = top.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"config.json: eagle_config must be an object, got {nested!r}")
    said = (top, nested)
    _check_kind(source, nested, layers.get("model_type"))
    if has_windows((layers, top)):
        raise ValueError(
            f"{source.name!r} holds a layer with a window (layer_types): heads here see the whole "
            "text"
        )
    layer = (
        "midlayer." if any(name.startswith("midlayer.") for name in source.files) else "layers.0."
    )
    rows, _ = matrix_shape(source, f"{layer}self_attn.q_proj.weight")
    hidden_size, _ = matrix_shape(source, f"{layer}self_attn.o_proj.weight")
    drafted = None
    if "lm_head.weight" in source.files:
        drafted, hidden_size = matrix_shape(source, "lm_head.weight")
    elif "d2t" not in source.files:
        notices.append("it has no vocabulary matrix of its own: the target's is read")
    check_width(source, layers, hidden_size)
    claimed = layers.get("num_hidden_layers")
    if layer == "midlayer." and type(claimed) is int and claimed != 1:
        # The authors' own files may say the target's number, and their code reads none.
        notices.append(
            f"config.json says num_hidden_layers: {claimed}, the weights hold 1: taken from the "
            "weights"
        )
    else:
        agree(source, "num_hidden_layers", claimed, 1)
    features = _features(source, nested, hidden_size, num_layers, notices)
    unread = ("fc.weight",) if features is None and "fc.weight" in source.files else ()
    if unread:
        notices.append(
            "fc.weight is left out: the last hidden state is read (use_aux_hidden_state)"
        )
    scale = one_of_said((*said, layers), "logit_scale")
    config = HeadsConfig(
        kind="eagle3",
        num_heads=steps_said(source, notices),
        logit_scale=1.0 if scale is None else scale,
        vocab_matrix="shared" if drafted is None else "own",
        draft_vocab_size=drafted if "d2t" in source.files else None,
        features=features,
        decoder=_shape(source, said, layers, rows),
        hidden_size=hidden_size,
        vocab_size=vocabulary_size(source, (layers, top), target_vocab, drafted),
    )
    theirs = partial(_theirs, layer=layer)
    tensors = read_tensors(source, config, theirs, "EAGLE-3's one layer", notices, unread)
    return config, tensors, notices


def _check_kind(source: Source, nested: Mapping[str, Any], kind: Any) -> None:
    """Raises ValueError, by name: a layer of another kind, or several."""
    if kind not in _LIKE_LLAMA:
        raise ValueError(f"{source.name!r} holds a layer of {kind!r}: heads here hold Llama's")
    what = [_OTHERS[o] for o in _OTHERS if any(re.fullmatch(o, name) for name in source.files)]
    what += [f"a layer of other norms ({n})" for n in _NORMS if nested.get(n) is _NORMS[n]]
    if what:
        raise ValueError(f"{source.name!r} holds {what[0]}: heads here hold Llama's")
    numbers = {match[1] for name in source.files if (match := _LAYER.match(name))}
    if len(numbers) > 1:
        raise ValueError(f"{source.name!r} holds {len(numbers)} layers: heads here hold one")


_LAYER = re.compile(r"layers\.(\d+)\.")


def _theirs(ours: str, layer: str) -> str:
    """Of a tensor of ours, where the layer has a name of theirs."""
    return ours.removeprefix("decoder.").replace("midlayer.", layer, 1)


def _shape(
    source: Source, said: Sequence[Mapping[str, Any]], layers: Mapping[str, Any], rows: int
) -> DecoderShape:
    """Of the layer; what is said of its norms may stand in `eagle_config`, as NVIDIA's files have
    it, whose TensorRT-LLM calls one of them by another name. Of those that have weights these tell
    where nothing is said."""
    before = one_of_said(said, "norm_before_residual")
    if before is None:  # speculators' own default differs from that of the files that vLLM reads
        before = "speculators_model_type" in said[0]
    each, together = (one_of_said(said, key) for key in ("fc_norm", "norm_before_fc"))
    if each is None and together is None:
        each, together = (f"{n}.weight" in source.files for n in ("fc_norm.0", "input_norm"))
    norm = "each" if each else "all" if together else "none"
    everywhere = (*said, layers)
    behind = one_of_said(everywhere, "norm_output")
    behind = behind or one_of_said(everywhere, "return_hidden_post_norm")
    ours = {"norm_before_residual": before, "feature_norm": norm, "norm_output": behind or False}
    return DecoderShape.from_dict(shape_said(layers, rows) | ours)


def _features(
    source: Source,
    nested: Mapping[str, Any],
    hidden_size: int,
    num_layers: int | None,
    notices: list[str],
) -> list[int] | None:
    """The layers whose outputs are read; None for the last hidden state alone."""
    read = nested.get("use_aux_hidden_state")
    if read is not None and not read:
        return None
    key = "eagle_aux_hidden_state_layer_ids"
    into = source.config.get(key)
    ids = into or nested.get(key)
    usual = _usual_layers(num_layers or 0)
    if not ids and usual and matrix_shape(source, "fc.weight")[1] == len(usual) * hidden_size:
        into = ids = usual
        notices.append(
            f"which layers it reads is not said: {ids}, as is usual for a target of {num_layers} "
            f"layers ({key} in its config.json says others)"
        )
    if not ids:
        raise ValueError(
            f"{source.name!r} does not say which layers it reads: give the target, or add {key}, "
            "for a target of L layers by default [2, L // 2, L - 3], to its config.json"
        )
    if isinstance(ids, list) and all(type(number) is int for number in ids):
        ids = sorted(ids)  # they are read in the target's order, and ModelOpt wrote a set of them
    by = "outputs"
    # There projects count in either way: ModelOpt and SpecForge what comes out, others what goes
    # in. Which it is, the usual layers tell, and one behind the last.
    if not into and isinstance(ids, list) and (ids == usual or ids[-1] == num_layers):
        by, into = "inputs", ids
    features = layer_ids(source, ids, key, hidden_size, first=1 if into else 0)
    if source.config.get(key) and ids == [number - 1 for number in usual]:
        notices.append(
            f"{key} {ids} are the usual ones by what comes out of layers, and are taken for those "
            "whose inputs are read, as vLLM takes them: if few drafts are accepted, say one more"
        )
    if not source.config.get(key) and nested.get(key):
        doubt, beside = "", f"beside eagle_config ({key})"
        if by == "outputs" and ids[0] != 1:
            doubt = f"; if they are counted by what goes in, say them too {beside}"
        elif ids == usual:
            doubt = f"; if they are counted by what comes out, say one more of each {beside}"
        notices.append(
            f"eagle_config's layers {ids} are taken for those whose {by} are read{doubt}"
        )
    return features


def _usual_layers(num_layers: int) -> list[int]:
    """What the authors' code reads, counted by what goes in; none where these are no three."""
    usual = [2, num_layers // 2, num_layers - 3]
    return usual if usual == sorted(set(usual)) else []
