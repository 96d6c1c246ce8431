"""What the checkpoints of EAGLE-3, DFlash and DSpark have in common: layers, a reduced vocabulary,
and the configuration that speculators puts around them.

`d2t` holds, for each token that can be drafted, how far the target's id lies above its own; `t2d`
which of the target's tokens these are.

Shapes: D hidden, V vocabulary, C tokens that can be drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.stored_heads import (
    DRAFT_TOKENS,
    StoredHeads,
    are_ascending,
    expected_shapes,
)
from medusa_heads.config import MOST_STEPS, HeadsConfig
from medusa_heads.decoder_shape import LayerShape
from medusa_heads.interop.source import IDS, Source
from medusa_heads.settings import MOST

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
    theta = one_of_said((said,), "rope_theta")
    rope = {"rope_theta": 10_000.0 if theta is None else theta} | rope
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] in ("llama3", "yarn") and said.get("max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", said["max_position_embeddings"])
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


def agree(source: Source, key: str, said: Any, found: int) -> None:
    """Raises ValueError: the configuration says of the tensors what they are not."""
    if said is not None and (type(said) is not int or said != found):
        raise ValueError(
            f"{source.name!r}: config.json says {key}: {said!r}, and the tensors say {found}: the "
            "two files are of different checkpoints, or damaged"
        )


def vocabulary_size(
    source: Source, said: Sequence[Mapping[str, Any]], target_vocab: int | None, drafted: int | None
) -> int:
    """Tokens of the target; `drafted`: rows of an own vocabulary matrix. Raises ValueError: they
    are not said, or others than the target has, or which of them are drafted is not."""
    claimed, reduced = one_of_said(said, "vocab_size"), "d2t" in source.files
    size = claimed or target_vocab or (None if reduced else drafted)
    if type(size) is not int or size < 1:
        raise ValueError(
            f"{source.name!r} does not say its target's vocab_size (it says {claimed!r}): give the "
            "target"
        )
    if target_vocab not in (None, size):
        raise ValueError(
            f"{source.name!r} was made for a vocabulary of {size}, and the target's has "
            f"{target_vocab} tokens: give the target it belongs to"
        )
    if drafted is not None:
        agree(source, "draft_vocab_size", one_of_said(said, "draft_vocab_size"), drafted)
    if reduced and drafted is None:
        raise ValueError(f"{source.name!r} lacks lm_head.weight of its reduced vocabulary")
    if drafted not in (None, size) and not reduced:
        raise ValueError(
            f"{source.name!r} lacks d2t, which says what {drafted} of the target's {size} tokens "
            "it drafts: download it anew"
        )
    return size


def layer_ids(source: Source, ids: Any, key: str, hidden_size: int, *, first: int) -> list[int]:
    """Numbers from 0 of the target's layers that are read, which are said under `key` and counted
    from `first` there. Raises ValueError: they are none, or others than fc.weight reads."""
    if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
        raise ValueError(
            f"{source.name!r} does not say which layers it reads: add {key} to its config.json"
        )
    if ids != sorted(set(ids)) or ids[0] < first or ids[-1] > MOST:
        raise ValueError(
            f"{source.name!r}: {key} must be numbers of the target's layers in ascending order, "
            f"counted from {first}, got {ids}"
        )
    _, columns = matrix_shape(source, "fc.weight")
    if columns != len(ids) * hidden_size:
        raise ValueError(
            f"{source.name!r}: config.json says {key}: {ids}, and fc.weight reads "
            f"{columns / hidden_size:g} layers: the two files are of different checkpoints, or "
            "damaged"
        )
    return [number - first for number in ids]


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


def read_tensors(
    source: Source,
    config: HeadsConfig,
    theirs: Callable[[str], str],
    whole: str,
    notices: list[str],
    left_out: Collection[str] = (),
) -> dict[str, Tensor]:
    """The heads' tensors by our names, of each of which there is `theirs`. Raises ValueError: one
    is missing, surplus or ill-fitting, or no part of the `whole`."""
    expected = expected_shapes(config)
    expected.pop(DRAFT_TOKENS, None)
    names = {ours: theirs(ours) for ours in expected}
    if missing := sorted(set(names.values()) - set(source.files)):
        raise ValueError(f"{source.name!r} lacks {missing[0]} of its layers: download it anew")
    if surplus := sorted(set(source.files) - {*names.values(), *BESIDE, *left_out}):
        raise ValueError(f"{source.name!r}: {surplus[0]} is no tensor of {whole}")
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
    above_C, own_C = source.read("d2t", expected=IDS), torch.arange(config.num_candidates)
    assert config.vocab_size is not None
    if above_C.shape != own_C.shape or not are_ascending(above_C + own_C, config.vocab_size):
        raise ValueError(
            f"{source.name!r}: d2t must say of {config.num_candidates} tokens, in ascending order, "
            f"how far their ids among {config.vocab_size} lie above their own"
        )
    if "t2d" in source.files:
        marked_C = source.read("t2d", expected=None).bool().flatten().nonzero().flatten()
        if not torch.equal(marked_C, above_C + own_C):
            raise ValueError(
                f"{source.name!r}: t2d does not mark the tokens that d2t says: it is damaged"
            )
    return above_C + own_C


def one_of_said(said: Sequence[Mapping[str, Any]], *keys: str) -> Any:
    """The first value that any of the configurations gives for any of the keys."""
    found = (of[key] for key in keys for of in said if of.get(key) is not None)
    return next(found, None)
