"""What the checkpoints of EAGLE-3, DFlash and DSpark have in common: layers, a reduced vocabulary,
and the configuration that speculators puts around them.

`d2t` holds, for each token that can be drafted, how far the target's id lies above its own; `t2d`
which of the target's tokens these are.

Shapes: D hidden, V vocabulary, C tokens that can be drafted.
"""

from __future__ import annotations

import re
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
from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import LayerShape
from medusa_heads.interop.said import one_of_said
from medusa_heads.interop.source import IDS, Source
from medusa_heads.interop.target_files import TargetVocabulary
from medusa_heads.settings import MOST

EMBEDDINGS = "embed_tokens.weight"
BESIDE = ("d2t", "t2d", EMBEDDINGS)
_BEHIND_A_PREFIX = re.compile(r"model\.(midlayer\..*|(layers\.0\.)?hidden_norm\.weight)")
_QUANTISED = re.compile(
    r".+\.(weight_(packed|scale(_inv|_2)?|shape|zero_point)|qweight|qzeros|scales|input_scale|g_idx)"
)
_BY_TOKENS = ("lm_head.weight", "correction.after.weight")  # a row for each that can be drafted
_POSITIONS = 131072
_ROWS, _ROUNDED, _FEW_ROWS = 4096, 0.02, 0.01  # of embeddings that may differ, and how far


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
    rope = dict(shape.rope_parameters)
    # Which alone transformers reads before its version 5, and engines on such a one.
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        **{part.name: getattr(shape, part.name) for part in fields(LayerShape)},
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta"),
        **({} if rope["rope_type"] == "default" else {"rope_scaling": scaling}),
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


def without_prefix(source: Source) -> None:
    """Let the tensors of a drafter, written as a model of transformers with an lm_head, go by the
    names that all others have."""
    if any(_BEHIND_A_PREFIX.fullmatch(name) for name in source.files):
        source.call({name: name.removeprefix("model.") for name in source.files})


def check_unquantised(source: Source) -> None:
    """Raises ValueError: the names of tensors say that they are quantised."""
    if found := next(filter(_QUANTISED.fullmatch, sorted(source.files)), None):
        raise ValueError(f"{source.name!r} is quantised ({found}): convert one that is not")


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
        source.check_shape(names[name], wanted)
    tensors = {ours: source.read(theirs) for ours, theirs in names.items()}
    if config.draft_vocab_size is not None:
        tensors[DRAFT_TOKENS], order = _tokens(source, config).sort()
        for name in set(_BY_TOKENS) & set(tensors):
            tensors[name] = tensors[name][order]
    if EMBEDDINGS in source.files:
        notices.append("its copy of the token embeddings is left out: the target's own are read")
    return tensors


def _tokens(source: Source, config: HeadsConfig) -> Tensor:
    """Which tokens are drafted, in the order that the source has them in."""
    above_C = source.read("d2t", expected=[*IDS, "int32"]).long()
    own_C, size = torch.arange(config.num_candidates), config.vocab_size
    assert size is not None
    same = above_C.shape == own_C.shape
    if not same or not are_ascending((above_C + own_C).sort().values, size):
        raise ValueError(
            f"{source.name!r}: d2t must say of {config.num_candidates} tokens how far their ids, "
            f"all different and among {size}, lie above their own"
        )
    if "t2d" in source.files:
        marked_C = source.read("t2d", expected=None).bool().flatten().nonzero().flatten()
        if not torch.equal(marked_C, (above_C + own_C).sort().values):
            raise ValueError(
                f"{source.name!r}: t2d does not mark the tokens that d2t says: it is damaged"
            )
    return above_C + own_C


def check_embeddings(source: Source, config: HeadsConfig, known: TargetVocabulary) -> None:
    """Raises ValueError: a copy of the token embeddings is not the target's, which are read in its
    place; or an eagle3 layer has them for a vocabulary matrix, and the target has another."""
    tied = config.vocab_matrix == "shared" and source.config.get("tie_word_embeddings")
    if tied and config.kind == "eagle3" and not torch.equal(known.weight_VD, known.embeddings_VD()):
        raise ValueError(
            f"{source.name!r} has its token embeddings for a vocabulary matrix, and the target's "
            "lm_head is none (tie_word_embeddings): heads here would read that"
        )
    if EMBEDDINGS not in source.files:
        return
    target_VD = known.embeddings_VD()
    own_VD, differing = source.read(EMBEDDINGS), 0
    if own_VD.shape == target_VD.shape:
        for own, target in zip(own_VD.split(_ROWS), target_VD.split(_ROWS), strict=True):
            gap = (own.float() - target.float()).abs().amax(dim=-1)
            differing += int((gap > _ROUNDED * target.float().abs().amax(dim=-1)).sum())
    else:
        differing = len(own_VD)
    if differing > _FEW_ROWS * len(own_VD):
        raise ValueError(
            f"{source.name!r} has other token embeddings than the target for {differing} of "
            f"{len(own_VD)} tokens, and heads here read the target's: give the target they belong "
            "to; drafts of embeddings that were trained with them cannot be had here"
        )
