"""The block drafters DFlash and DSpark, as speculators and vLLM read and write them, and DFlash as
transformers does, as an assistant.

Speculators counts layers by what goes into them, all others by what comes out. A block has as many
queries as `block_size` says; where the first of them drafts nothing, one more than there are heads.

Shapes: D hidden, V vocabulary, W rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS, StoredHeads
from medusa_heads.config import MOST_STEPS, HeadsConfig
from medusa_heads.decoder_shape import BlockShape
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
from medusa_heads.interop.said import (
    has_windows,
    layers_said,
    number_said,
    one_of_said,
    shape_said,
    steps_said,
)
from medusa_heads.interop.source import Source
from medusa_heads.settings import MOST
from medusa_heads.target.layers import decoder_layers

DFLASH_MARK = r"(encoder\.output_norm_enc|hidden_norm)\.weight"
DSPARK_MARK = r"(logit_head\.)?(markov_head\.)?markov_w[12]\.weight"
_ASSISTANT = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
ASSISTANT_TYPE = "muse_glimmer_assistant"  # the one model that transformers has of the kind
_CORRECTION = {
    "correction.before.weight": "markov_head.markov_w1.weight",
    "correction.after.weight": "markov_head.markov_w2.weight",
}
# ModelOpt's, and SpecForge's of earlier versions.
_ELSEWHERE = {
    f"{place}{name}.weight": f"markov_head.{name}.weight"
    for place in ("", "logit_head.markov_head.")
    for name in ("markov_w1", "markov_w2")
}
_CONFIDENCE = ("confidence_head.", "confidence_proj.", "logit_head.confidence_head.")
_MASK_FILE = "mask_embedding.pt"
_QUERY = re.compile(r"layers\.(\d+)\.self_attn\.q_proj\.weight")


def written(
    stored: StoredHeads, matrix_VD: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and config.json of block heads; `matrix_VD` is the target's vocabulary matrix
    where the heads share that and draft from rows of it alone."""
    config, shape = stored.config, stored.config.decoder
    assert isinstance(shape, BlockShape) and config.features is not None
    tensors = {
        _theirs(name): tensor for name, tensor in stored.tensors.items() if name != DRAFT_TOKENS
    }
    if (after := _CORRECTION["correction.after.weight"]) in tensors:
        # Engines add it to products that are not scaled: the likeliest token is the same.
        tensors[after] = tensors[after] / config.logit_scale
    said: dict[str, Any] = {
        "block_size": config.num_heads + (not shape.sample_from_anchor),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.features],
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": shape.sample_from_anchor,
        # There is no window. vLLM lets a block's queries see only what stands before them where it
        # does not read this, windows or not.
        "sliding_window_non_causal": True,
        "dtype": str(tensors["norm.weight"].dtype).removeprefix("torch."),
    }
    algorithm = "dflash" if config.correction_rank is None else "dspark"
    if algorithm == "dspark":
        said |= {
            "markov_rank": config.correction_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        }
    said["architectures"] = ["DSparkSpeculator" if algorithm == "dspark" else "DFlashSpeculator"]
    layers = layer_settings(config, shape, "qwen3", config.num_layers)
    full = speculators_config(stored, algorithm, layers, said)
    return tensors | vocabulary_tensors(stored, matrix_VD), full


def assistant(stored: StoredHeads) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and config.json of block heads as transformers' generate() takes an assistant
    with `speculation_type="dflash"`."""
    config, shape = stored.config, stored.config.decoder
    assert isinstance(shape, BlockShape) and config.features is not None
    names = {ours: theirs for theirs, ours in _ASSISTANT.items()}
    tensors = {names.get(_theirs(n), _theirs(n)): tensor for n, tensor in stored.tensors.items()}
    return tensors, {
        **layer_settings(config, shape, ASSISTANT_TYPE, config.num_layers),
        "architectures": ["MuseGlimmerAssistantModel"],
        "layer_types": ["full_attention"] * config.num_layers,
        "block_size": config.num_heads + 1,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(config.features),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "dtype": str(tensors["norm.weight"].dtype).removeprefix("torch."),
    }


def projector_said(source: Source) -> str | None:
    """The layout by what is said to stand behind a block, where architectures say DFlash of all."""
    nested = source.config.get("dflash_config")
    said = nested.get("projector_type") if isinstance(nested, dict) else None
    return said if said in ("dspark", "domino") else None


def check_block(source: Source, model: Any, config: HeadsConfig) -> list[str]:
    """What the user should know of a block and its target. Raises ValueError: `check_assistant`, or
    the target hands its embeddings to blocks of these authors scaled."""
    if source.config.get("model_type") == ASSISTANT_TYPE:
        check_assistant(model, config)
    elif "speculators_model_type" not in source.config:  # whose blocks read what lies there
        _check_scale(model, "its authors' code", "train heads for this target")
        if len(decoder_layers(model, "name another target")) - 1 in (config.features or ()):
            return [
                "the target's last layer is read before the final norm, as vLLM and SGLang read "
                "it; its authors' code for transformers reads it behind that"
            ]
    return []


def check_assistant(model: Any, config: HeadsConfig) -> None:
    """Raises ValueError: these heads read the target's last layer, before the final norm, and
    assistants of transformers behind it; or the target's embeddings, which transformers hands to
    assistants scaled."""
    last = len(decoder_layers(model, "name another target")) - 1
    if last in (config.features or ()):
        raise ValueError(
            f"heads here read the target's last layer ({last}) before the final norm, and "
            "transformers' assistants behind it: train with features of other layers"
        )
    _check_scale(model, "transformers' assistants", "decode with this package")


def _check_scale(model: Any, others: str, instead: str) -> None:
    embeddings = model.get_input_embeddings()
    # A model without weights holds no value of a buffer; the number beside it is a plain one.
    scale = getattr(embeddings, "scalar_embed_scale", getattr(embeddings, "embed_scale", None))
    if isinstance(scale, Tensor) or scale not in (None, 1):
        raise ValueError(
            f"the target ({type(model).__name__}) scales its token embeddings (embed_scale), which "
            f"heads here read unscaled and {others} scaled: {instead}"
        )


def read(
    source: Source, target_vocab: int | None, _num_layers: int | None = None, *, corrected: bool
) -> tuple[HeadsConfig, dict[str, Tensor], list[str]]:
    """Heads under our names, and what the user should know; `target_vocab`: rows of the target's
    lm_head, where it is known; `corrected` as DSpark's are. Raises ValueError: a block of another
    kind, or a tensor or setting that is missing, surplus or ill-fitting."""
    source.call(_ASSISTANT | _ELSEWHERE)
    top, layers, notices = source.config, layers_said(source), list[str]()
    nested = top.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"config.json: dflash_config must be an object, got {nested!r}")
    said = (nested, top, layers)
    _check_kind(source, said, corrected)
    confidence = [name for name in source.files if name.startswith(_CONFIDENCE)]
    if confidence:
        notices.append(
            "its confidence head is left out: how far to draft follows from the heads' own chances"
        )
    numbers = {int(match[1]) for name in source.files if (match := _QUERY.fullmatch(name))}
    if numbers != set(range(len(numbers))) or not numbers:
        raise ValueError(f"{source.name!r} lacks one of its layers: download it anew")
    agree(source, "num_hidden_layers", layers.get("num_hidden_layers"), len(numbers))
    hidden_size, _ = matrix_shape(source, "fc.weight")
    check_width(source, layers, hidden_size)
    own = matrix_shape(source, "lm_head.weight")[0] if "lm_head.weight" in source.files else None
    vocab_size = vocabulary_size(source, (layers, top), target_vocab, own)
    rank = matrix_shape(source, _CORRECTION["correction.before.weight"])[1] if corrected else 0
    agree(source, "markov_rank", one_of_said(said, "markov_rank", "dspark_markov_rank"), rank)
    anchor = one_of_said(said, "sample_from_anchor")
    anchor = corrected if anchor is None else anchor
    size = one_of_said((top, nested), "block_size", "dspark_block_size")
    if size is None:
        steps = steps_said(source, notices)
    else:
        steps = number_said("block_size", size, 2 - bool(anchor), MOST_STEPS + (not anchor))
        steps -= not anchor
    rows, _ = matrix_shape(source, "layers.0.self_attn.q_proj.weight")
    mask = one_of_said(said, "mask_token_id", "dspark_noise_token_id")
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise ValueError(
            f"{source.name!r}: mask_token_id must be one of the target's {vocab_size} tokens, got "
            f"{mask!r}"
        )
    shape = {"mask_token_id": mask, "sample_from_anchor": anchor}
    config = HeadsConfig(
        kind="block",
        num_heads=steps,
        num_layers=len(numbers),
        vocab_matrix="shared" if own is None else "own",
        draft_vocab_size=own if "d2t" in source.files else None,
        correction_rank=rank or None,
        features=_features(source, said, hidden_size, len(numbers), notices),
        decoder=BlockShape.from_dict(shape_said(layers, rows) | shape),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
    )
    left_out = (*confidence, "verifier_norm.weight", "verifier_lm_head.weight")
    tensors = read_tensors(source, config, _theirs, "a block's layers", notices, left_out)
    return config, tensors, notices


def _theirs(ours: str) -> str:
    return _CORRECTION.get(ours, ours.removeprefix("prefix."))


def _check_kind(source: Source, said: tuple[Mapping[str, Any], ...], corrected: bool) -> None:
    """Raises ValueError, by name: what a block here cannot be."""
    unscaled = (None, 1)
    unsaid = not one_of_said(said, "layer_types")
    windows = has_windows(said) or (
        unsaid and one_of_said(said, "model_type") == ASSISTANT_TYPE  # whose layers have some
    )
    strange = {
        "layers with a window (layer_types)": windows or one_of_said(said, "use_swa"),
        # DSpark's always do: its anchor drafts the first.
        "targets that lie a token further on (shift_label)": one_of_said(said, "shift_label")
        and not (corrected and one_of_said(said, "sample_from_anchor") is not False),
        "queries that see only what stands before them (causal)": one_of_said(said, "causal")
        or one_of_said(said, "is_causal"),
        "attention sinks": one_of_said(said, "attention_sink_bias", "add_swa_attention_sink_bias"),
        "scaled values (attention_value_scale)": one_of_said(said, "attention_value_scale"),
        "scaled embeddings (input_embedding_scale)": one_of_said(said, "input_embedding_scale")
        not in unscaled,
        "scaled logits (logit_scale)": one_of_said(said, "logit_scale") not in unscaled,
        # They order a token's logits as before, but for what a correction adds to them.
        "scaled logits (output_multiplier)": corrected
        and one_of_said(said, "output_multiplier") not in unscaled,
        "capped logits (final_logit_softcapping)": corrected
        and one_of_said(said, "final_logit_softcapping"),
        "positions turned pair by pair (is_neox_style)": one_of_said(said, "is_neox_style")
        is False,
        "a correction with a state (markov_head_type)": one_of_said(said, "markov_head_type")
        not in (None, "vanilla"),
        f"an embedding of its own for masks ({_MASK_FILE})": source.find(_MASK_FILE) is not None,
    }
    if found := [what for what, is_so in strange.items() if is_so]:
        raise ValueError(f"{source.name!r} holds a block with {found[0]}: blocks here have none")


def _features(
    source: Source,
    said: tuple[Mapping[str, Any], ...],
    hidden_size: int,
    num_layers: int,
    notices: list[str],
) -> list[int]:
    out = one_of_said(said, "target_layer_ids", "dspark_target_layer_ids")
    into = one_of_said(said, key := "aux_hidden_state_layer_ids")
    most = one_of_said(said, "num_target_layers")
    if not into and not out and most is not None:
        out = _usual_layers(number_said("num_target_layers", most, 1, MOST), num_layers)
        notices.append(f"which layers it reads is not said: {out}, as its authors' code does then")
    if into or not out:
        return layer_ids(source, into, key, hidden_size, first=1)
    return layer_ids(source, out, "target_layer_ids", hidden_size, first=0)


def _usual_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """What the authors' code reads: as many of the target's layers as the block has, from layer 1
    to the third last."""
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers)]
