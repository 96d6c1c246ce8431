"""Another project's heads, as a checkpoint of this one.

Shapes: D hidden, V vocabulary.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.files import SIDECAR_FILE, empty_folder, staged
from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.checkpoint.stored_heads import (
    DRAFT_TOKENS,
    StoredHeads,
    check_takes_matrix,
    write_stored,
)
from medusa_heads.config import HeadsConfig
from medusa_heads.files import expanded
from medusa_heads.hub.names import refuse_revision
from medusa_heads.interop import ReadFormat, eagle3
from medusa_heads.interop.block import check_block, projector_said
from medusa_heads.interop.decoders import (
    EMBEDDINGS,
    check_embeddings,
    check_unquantised,
    without_prefix,
)
from medusa_heads.interop.formats import DECODERS, FORMATS, Layout, find, without_heads
from medusa_heads.interop.layout import heads_config, read_heads, shared_matrix
from medusa_heads.interop.source import Source, open_source
from medusa_heads.interop.target_files import TargetVocabulary, read_target, write_model
from medusa_heads.target.features import check_layers
from medusa_heads.target.fingerprint import lm_head_sha256

TARGET_FOLDER = "target"
# What is taken for heads, by the names of its tensors.
_NO_HEADS = {
    r".*\.lora_[AB](\..*)?\.weight": "a LoRA adapter: peft puts that into its target",
    r"(.*\.)?mtp(_\w+)?\..*|.*\.(eh_proj|enorm|hnorm)\.weight": "multi-token-prediction modules: "
    "medusa-heads generate --drafter mtp drafts with those of a target",
    r"(model\.)?fc\.(weight|bias)|fusion_fc\..*": "a layer of EAGLE-1 or EAGLE-2: convert one of "
    "EAGLE-3",
    r"(model|transformer|gpt_neox)\..*layers?\..*|transformer\.h\..*": "a whole model: train "
    "heads for it with train-heads",
}
# Whose configuration it is, by its architecture.
_SAID: dict[str, ReadFormat] = {
    eagle3.ARCHITECTURE: "eagle3",
    "DFlashDraftModel": "dflash",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
}


@dataclass(frozen=True)
class Converted:
    """What was read, the folder where it stands now, and what the user should know."""

    folder: Path
    format: ReadFormat
    stored: StoredHeads
    notices: tuple[str, ...]


def convert_heads(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    source_format: ReadFormat | None = None,
    revision: str | None = None,
    target: str | None = None,
    extract_target: bool = False,
    with_vocab_matrix: bool = False,
    trust_remote_code: bool = False,
) -> Converted:
    """Write heads that another project stored as a checkpoint folder, bit for bit the same values.
    Raises ValueError: an unknown layout, tensors missing, surplus, ill-fitting, quantised or not
    finite, a target they cannot belong to, or a revision of what lies on this machine; OSError:
    `out` cannot be written.

    Args:
        source: a file, a folder, or a repository of the hub, of which `revision` is taken.
        source_format: the layout; by default what the names of the tensors tell.
        target: hub id or folder of the model that the heads belong to. It is named in the
            checkpoint, and its lm_head, read from its files, gives the fingerprint.
        extract_target: of a whole model with heads in it: write the model alone to `out`/target.
            Otherwise the checkpoint names the source as its target.
        with_vocab_matrix: put a copy of the target's vocabulary matrix beside heads that share it.
    """
    folder = empty_folder(out)
    if source_format is not None and source_format not in FORMATS:
        raise ValueError(f"expected a layout among {', '.join(FORMATS)}, got {source_format!r}")
    if expanded(source).exists():
        refuse_revision(source, revision)
    found = open_source(os.fspath(source), revision=revision)
    if found.find(SIDECAR_FILE) is not None:
        raise ValueError(
            f"{os.fspath(source)!r} is a heads checkpoint of this package already: use it as it "
            "is, or write it for an engine with medusa-heads export"
        )
    without_prefix(found)
    source_format = source_format or _detect(found)
    _check_layout(found, source_format)
    if decoder := DECODERS.get(source_format):
        check_unquantised(found)
    layout = Layout({}, {}) if decoder else find(found, source_format)
    if extract_target and (not layout.whole_model or target is not None):
        raise ValueError(
            "extract_target writes the model that the heads lie in: give it a source that is a "
            "whole model, and no other target"
        )
    inner = None
    if layout.whole_model:
        inner = read_target(
            found.place, revision=found.revision, trust_remote_code=trust_remote_code
        )
    known = inner
    if target is not None:
        known = read_target(target, trust_remote_code=trust_remote_code)
        if inner is not None and known.target["lm_head_sha256"] != inner.target["lm_head_sha256"]:
            raise ValueError(
                f"the model in {found.name!r} has another lm_head than {target!r}, and its heads "
                "were trained with it: leave the target out"
            )
    rows = None if known is None else len(known.weight_VD)
    if decoder is not None:
        config, tensors, layout.notices = decoder(found, rows, _num_layers(known))
    else:
        config = heads_config(found, layout, rows)
    if known is not None and known.weight_VD.shape != (config.vocab_size, config.hidden_size):
        raise ValueError(
            f"the heads were made for a vocabulary of {config.vocab_size} and a hidden size of "
            f"{config.hidden_size}, the target's are {list(known.weight_VD.shape)}: give the "
            "target they belong to"
        )
    if known is not None:
        check_layers(known.model, config.features or ())
        if config.kind == "block":
            layout.notices += check_block(found, known.model, config)
        if decoder is not None:
            check_embeddings(found, config, known)
    elif decoder is not None and EMBEDDINGS in found.files:
        layout.notices.append("--target would tell whether these embeddings are the target's")
    if decoder is None:
        tensors = read_heads(found, layout, config)
    matrix_VD = shared_matrix(found, layout, config)
    if known is not None and matrix_VD is not None:
        _check_matrix(matrix_VD, known, tensors.get(DRAFT_TOKENS))
    named = known.target if known is not None else _claimed_target(found, config, matrix_VD)
    if extract_target:
        named = named | {"name_or_path": str(folder / TARGET_FOLDER), "revision": None}
    stored = StoredHeads(
        config,
        tensors,
        named,
        provenance=provenance({"converted_from": {"format": source_format, "source": found.name}}),
        vocab_matrix_VD=(
            _copied_matrix(config, tensors, matrix_VD, known) if with_vocab_matrix else None
        ),
    )
    with staged(folder) as made:
        if extract_target:
            write_model(made / TARGET_FOLDER, found, *without_heads(found), {})
        write_stored(made, stored)
    return Converted(folder, source_format, stored, (*layout.notices, *_of_target(stored)))


def _detect(source: Source) -> ReadFormat:
    """The layout that the names of the tensors are in. Raises ValueError: they are in none, or in
    several."""
    found: list[ReadFormat] = [
        name
        for name, form in FORMATS.items()
        if name not in ("tgi", "lorax") and form.recognises(source)
    ]
    if found == ["dflash", "dspark"]:  # which is the former and more
        found = ["dspark"]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"{source.name!r} holds heads in several layouts ({', '.join(found)}): say which with "
            "--from"
        )
    for mark, what in _NO_HEADS.items():
        if any(re.fullmatch(mark, name) for name in source.files):
            raise ValueError(f"{source.name!r} holds no heads but {what}")
    some = ", ".join(sorted(source.files)[:3]) or "none"
    raise ValueError(
        f"{source.name!r} holds no heads of a known layout (its tensors: {some}, ...): known are "
        f"{', '.join(FORMATS)}"
    )


def _check_layout(source: Source, name: ReadFormat) -> None:
    """Raises ValueError: the tensors are not in the layout `name`, or config.json is of another."""
    if not FORMATS[name].recognises(source):
        raise ValueError(
            f"{source.name!r} is not in the layout {name!r}: it looks like {_detect(source)!r}"
        )
    said = source.config.get("speculators_model_type") or projector_said(source)
    architectures = source.config.get("architectures")
    if said is None and isinstance(architectures, list):
        said = next((_SAID[each] for each in architectures if each in list(_SAID)), None)
    if said not in (None, name):
        raise ValueError(
            f"{source.name!r} holds tensors of the layout {name!r}, and its config.json is of "
            f"{said!r}: the two files are of different checkpoints, or of a kind that heads here "
            "are not"
        )


def _num_layers(known: TargetVocabulary | None) -> int | None:
    text = None if known is None else known.model.config.get_text_config(decoder=True)
    return getattr(text, "num_hidden_layers", None)


def _check_matrix(matrix_VD: Tensor, known: TargetVocabulary, tokens_V: Tensor | None) -> None:
    weight_VD = known.weight_VD
    if len(matrix_VD) < len(weight_VD):
        assert tokens_V is not None
        weight_VD = weight_VD[tokens_V]
    if not torch.equal(weight_VD.to(matrix_VD.dtype), matrix_VD):
        raise ValueError(
            f"the vocabulary matrix that the heads share is not that of the target "
            f"{known.target['name_or_path']!r}: give the target they belong to"
        )


def _claimed_target(found: Source, config: HeadsConfig, matrix_VD: Tensor | None) -> dict[str, Any]:
    """What the source says of a target whose files nobody has looked at."""
    name = found.config.get("base_model_name_or_path") or _verifier(found)
    if name is not None and not isinstance(name, str):
        raise ValueError(f"config.json: base_model_name_or_path must be a name, got {name!r}")
    sha256 = None
    if matrix_VD is not None and len(matrix_VD) == config.vocab_size:
        sha256 = lm_head_sha256(matrix_VD)  # the target's own
    return {
        "name_or_path": name or None,
        "revision": None,
        "model_type": None,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "lm_head_sha256": sha256,
    }


def _verifier(found: Source) -> Any:
    """The target by the name that speculators' files have for it."""
    said = found.config.get("speculators_config")
    verifier = said.get("verifier") if isinstance(said, dict) else None
    return verifier.get("name_or_path") if isinstance(verifier, dict) else None


def _copied_matrix(
    config: HeadsConfig,
    tensors: dict[str, Tensor],
    matrix_VD: Tensor | None,
    known: TargetVocabulary | None,
) -> Tensor:
    check_takes_matrix(config, bias=known is not None and known.bias_V is not None)
    if matrix_VD is not None:
        return matrix_VD
    if known is None:
        raise ValueError("with_vocab_matrix copies the target's: give the target (--target)")
    return known.weight_VD.to(tensors["0.0.linear.weight"].dtype)


def _of_target(stored: StoredHeads) -> list[str]:
    name = stored.target["name_or_path"]
    if not name:
        return ["the heads name no target: pass one when they are loaded, or convert with --target"]
    if stored.target["lm_head_sha256"] is None:
        return [
            f"the target is {name!r} by what config.json says, and will be checked by its sizes "
            "alone: --target records its fingerprint"
        ]
    return []
