"""A checkpoint of this package, as another engine reads heads, or a target with its modules.

Shapes: D hidden, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa_heads.checkpoint.files import VOCAB_MATRIX_FILE, empty_folder, staged
from medusa_heads.checkpoint.mtp_checkpoint import read_mtp_sidecar, read_mtp_tensors
from medusa_heads.checkpoint.stored_heads import (
    StoredHeads,
    check_same_target,
    check_target,
    read_stored,
    read_vocab_matrix,
)
from medusa_heads.files import expanded
from medusa_heads.hub.names import local_target
from medusa_heads.hub.pull import find_checkpoint
from medusa_heads.interop import WrittenFormat
from medusa_heads.interop.block import check_assistant
from medusa_heads.interop.engines import Outgoing
from medusa_heads.interop.fits import ENGINES, check_fits
from medusa_heads.interop.gguf_target import TargetFile
from medusa_heads.interop.source import open_source
from medusa_heads.interop.target_files import (
    TargetVocabulary,
    empty_model,
    read_target,
    write_model,
)
from medusa_heads.target.features import check_layers
from medusa_heads.target.fingerprint import lm_head_sha256
from medusa_heads.target.loading import refuse_code_of
from medusa_heads.target.mtp import check_names
from medusa_heads.target.target import TargetModel


@dataclass(frozen=True)
class Exported:
    """What was written, and what the user should know, a sentence each."""

    folder: Path
    notices: tuple[str, ...]


def export_heads(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: WrittenFormat,
    *,
    target: str | None = None,
    target_gguf: str | None = None,
    full_vocabulary: bool = False,
    trust_remote_code: bool = False,
) -> Exported:
    """Write a heads checkpoint, a folder or hub id, in the layout of another engine, bit for bit
    the same values. Raises ValueError: the engine cannot hold such heads, the target is not theirs,
    or code is to be run of a target that only the checkpoint names; OSError: `out` cannot be
    written.

    Args:
        target: hub id or folder by which the engine is to find it, and where its vocabulary matrix
            comes from, if the layout wants a copy; by default as the checkpoint says.
        target_gguf: the target's GGUF file, quantised or not; for llama.cpp alone, which wants its
            vocabulary in the drafter's file too.
        full_vocabulary: heads with a reduced vocabulary are to draft the target's whole one.
    """
    if to not in ENGINES:
        raise ValueError(f"expected an engine among {', '.join(ENGINES)}, got {to!r}")
    if (to == "gguf") != (target_gguf is not None):
        raise ValueError(
            "--to gguf wants the target's GGUF file: give target_gguf"
            if to == "gguf"
            else f"target_gguf is for --to gguf, and {to} reads none: leave it out"
        )
    folder = empty_folder(out)
    heads = find_checkpoint(checkpoint)
    stored = read_stored(heads)
    if stored.adapter is not None and target is None:
        raise ValueError(
            f"{str(checkpoint)!r} belongs to its target with an adapter in it, which {to} does not "
            "load with heads: merge it into the target, save that, and name it as the target"
        )
    known = None
    if target is None and trust_remote_code:
        refuse_code_of(stored.target)
    if target is not None:
        known = read_target(target, trust_remote_code=trust_remote_code)
        _check_target(stored, known)
        stored = replace(stored, target=known.target)
    else:
        stored = replace(stored, target=_from_here(stored.target, heads))
    outgoing = Outgoing(
        stored,
        str(expanded(out)),
        lambda: _matrix(heads, stored, known),
        lambda: (known or _named_target(stored)).embeddings_VD(),
    )
    if full_vocabulary:
        outgoing = outgoing.over_full_vocabulary()
    check_fits(outgoing.stored, to)
    if to == "transformers":
        check_assistant((known or _named_target(stored)).model, stored.config)
    if target_gguf is not None:
        outgoing.target_file = TargetFile.read(target_gguf)
        outgoing.target_file.check(outgoing.stored)
    with staged(folder) as made:
        outgoing.write(made, to)
    return Exported(folder, tuple(outgoing.notices))


def export_modules(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: WrittenFormat = "transformers",
    *,
    target: str | None = None,
    target_gguf: str | None = None,
    full_vocabulary: bool = False,
    trust_remote_code: bool = False,
) -> Exported:
    """Write a copy of a target's checkpoint with the modules of a folder in it, under their names
    there, for whatever runs a target with its modules: transformers' `use_mtp`, vLLM, SGLang.
    Raises ValueError: another layout is asked for, the folder or the target is damaged or not
    theirs; OSError: `out` cannot be written.

    Args:
        target: hub id or folder of the target; by default as the modules say.
        target_gguf, full_vocabulary: of heads alone.
        trust_remote_code: read a target that brings code of its own.
    """
    if to != "transformers" or full_vocabulary or target_gguf is not None:
        raise ValueError(
            "modules are written into a copy of their target, for transformers and the engines "
            "that run it with them: give --to transformers, and no other option of heads"
        )
    modules = expanded(checkpoint)
    folder, tensors = empty_folder(out), read_mtp_tensors(modules)
    named = _from_here(read_mtp_sidecar(modules)["target"], modules)
    name = target or named.get("name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{str(checkpoint)!r} does not name its target: give the target")
    if target is None and trust_remote_code:
        refuse_code_of(named)
    known = read_target(
        name,
        revision=None if target else named.get("revision"),
        trust_remote_code=trust_remote_code,
    )
    check_same_target("modules", named, {key: known.target[key] for key in _COMPARED}, "give")
    name = str(known.target["name_or_path"])
    source = open_source(name, revision=known.target["revision"], model=True)
    # They are written in place of what the target has under their names.
    check_names(TargetModel(empty_model(name, source, trust_remote_code)), tensors)
    with staged(folder) as made:
        rest = [name for name in source.files if name not in tensors]
        write_model(made, source, rest, source.config, tensors)
    return Exported(folder, ())


_COMPARED = ("hidden_size", "vocab_size", "lm_head_sha256")


def _from_here(target: Mapping[str, Any], checkpoint: Path) -> Mapping[str, Any]:
    """A target as a folder's files name it, a relative path made one that holds from here."""
    name, revision = target.get("name_or_path"), target.get("revision")
    found = local_target(name, revision, checkpoint) if name and isinstance(name, str) else None
    return target if found is None else {**target, "name_or_path": found}


def _check_target(stored: StoredHeads, known: TargetVocabulary) -> None:
    check_target(stored, {key: known.target[key] for key in _COMPARED}, "give")
    check_layers(known.model, stored.config.features or ())


def _matrix(checkpoint: Path, stored: StoredHeads, known: TargetVocabulary | None) -> Tensor:
    """The target's vocabulary matrix [V, D] in the heads' dtype: from beside the heads, else from
    the target's files."""
    if known is None and (checkpoint / VOCAB_MATRIX_FILE).is_file():
        matrix_VD = read_vocab_matrix(checkpoint, stored.config)
        if stored.target.get("lm_head_sha256") in (None, lm_head_sha256(matrix_VD)):
            return matrix_VD
    known = known or _named_target(stored)
    if known.bias_V is not None:
        raise ValueError(
            "the target's lm_head has a bias, for which this layout has no place: decode with this "
            "package"
        )
    dtype = next(t.dtype for t in stored.tensors.values() if t.is_floating_point())
    return known.weight_VD.to(dtype)


def _named_target(stored: StoredHeads) -> TargetVocabulary:
    name = stored.target.get("name_or_path")
    if not name:
        raise ValueError("the layout wants a matrix of the target's: give the target")
    known = read_target(name, revision=stored.target.get("revision"))
    _check_target(stored, known)
    return known
