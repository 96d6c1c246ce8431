"""A heads checkpoint and its target: saved from one, and loaded only onto the same.

Which files stand in the folder, `files.py` says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.adapter import adapter_digest, is_adapted
from medusa_heads.checkpoint.files import ADAPTER_FOLDER, FORMAT_VERSION, write_json
from medusa_heads.checkpoint.stored_heads import (
    DRAFT_TOKENS,
    StoredHeads,
    check_takes_matrix,
    check_target,
    read_sidecar,
    read_stored,
    write_stored,
)
from medusa_heads.contents import SIDECAR_FILE
from medusa_heads.files import replace_json
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.masking import masked
from medusa_heads.target.features import check_layers
from medusa_heads.target.loading import adapted_by
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class LoadedHeads:
    """Heads on their target, and what their checkpoint says of them."""

    heads: DraftHeads
    statistics: HeadStatistics | None
    stored: StoredHeads


def describe_target(target: TargetModel, adapter: PeftModel | None = None) -> dict[str, Any]:
    """A target as a sidecar has it: its name, revision and fingerprint. Where it carries another
    adapter than the one that is stored beside, under its name lies another model: it has none."""
    nameless = adapter is None and has_adapter(target) and not is_named_adapter(target)
    return {
        "name_or_path": "" if nameless else target.name_or_path,
        "revision": target.revision,
        **target.fingerprint(),
    }


def vouch(
    path: Path,
    folder: Path,
    target: TargetModel,
    measured: Mapping[str, Any] | None,
    provenance: Mapping[str, Any] | None,
    **more: Any,
) -> None:
    """Write the file that says of a folder's others that they are whole, where they wait to take
    their places: it comes last there, and the one of before goes first."""
    record = {"format_version": FORMAT_VERSION, **more, "target": describe_target(target)}
    record |= {"measured": dict(measured or {}), "provenance": masked(provenance or {})}
    write_json(path, record)
    (folder / path.name).unlink(missing_ok=True)


def has_adapter(target: TargetModel) -> bool:
    """Whether the target carries an adapter of peft's that is at work."""
    return hasattr(target.model, "peft_config") and is_adapted(target.model)


def is_named_adapter(target: TargetModel) -> bool:
    """Whether the target's name is that of an adapter, which it is loaded with."""
    return adapted_by(target.name_or_path, local_files_only=True) is not None


def save_heads(
    folder: str | os.PathLike[str],
    heads: DraftHeads,
    target: TargetModel,
    *,
    statistics: HeadStatistics | None = None,
    provenance: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    adapter: PeftModel | None = None,
    with_vocab_matrix: bool = False,
) -> Path:
    """Write a checkpoint folder, beside its place first and then renamed, file by file.

    Weights are stored in `dtype`, by default the target's own. An `adapter` that the heads were
    trained together with is stored beside them; from then on they are only loaded with it. With
    `with_vocab_matrix` so is a copy of the target's vocabulary matrix, for engines that want one.
    Raises ValueError: no engine would read the matrix, or the adapter is no plain LoRA adapter;
    OSError: the folder cannot be written.
    """
    dtype = dtype or target.dtype
    of_adapter = None
    if adapter is not None:
        of_adapter = {"folder": ADAPTER_FOLDER, "sha256": adapter_digest(target.model)}
    matrix_VD: Tensor | None = None
    if with_vocab_matrix:
        weight_VD, bias_V = heads.vocab_matrix(0)
        check_takes_matrix(heads.config, bias=bias_V is not None)
        matrix_VD = weight_VD.detach().to("cpu", dtype)
    stored = StoredHeads(
        config=heads.config,
        tensors={
            name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
            for name, tensor in heads.state_dict().items()
        },
        target=describe_target(target, adapter),
        statistics=statistics.to_dict() if statistics else None,
        provenance=provenance or {},
        adapter=of_adapter,
        vocab_matrix_VD=matrix_VD,
    )
    return write_stored(folder, stored, adapter=adapter)


def replace_statistics(
    folder: str | os.PathLike[str], statistics: HeadStatistics, measured: Mapping[str, Any]
) -> None:
    """Store other statistics of a checkpoint's heads, and in its provenance as `calibrated` how
    they were measured. All else stays as it is, and a reader finds the old or the new ones. Raises
    ValueError: not a checkpoint, or its heads are others than those measured; OSError: the folder
    cannot be written."""
    sidecar = read_sidecar(folder)
    if sidecar["heads"].get("num_heads") != statistics.num_heads:
        raise ValueError(
            f"{str(folder)!r} holds {sidecar['heads'].get('num_heads')} heads, and the statistics "
            f"are of {statistics.num_heads}: measure the heads that lie there"
        )
    sidecar["statistics"] = statistics.to_dict()
    known = sidecar.get("provenance") or {}
    sidecar["provenance"] = masked(known | {"calibrated": dict(measured)})
    replace_json(Path(folder) / SIDECAR_FILE, sidecar)


def load_heads(folder: str | os.PathLike[str], target: TargetModel) -> LoadedHeads:
    """Load heads onto their target, in its dtype and on its device. Raises ValueError: a missing,
    damaged or ill-fitting checkpoint, or another target's, or one whose heads belong to an adapter
    that the target does not carry."""
    stored = read_stored(folder)
    if target.get_output_embeddings().weight.is_meta:
        raise ValueError(
            "accelerate keeps the target's lm_head elsewhere, until a forward wants it, and heads "
            "read it as it lies: load the target whole on one device, without offloading"
        )
    check_target(stored, target.fingerprint(), "pass")
    check_layers(target.model, stored.config.features or ())
    if stored.adapter is not None:
        _check_adapter(stored.adapter, target, folder)
    # Fresh heads draw numbers before their weights are loaded: not from the user's seed.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        heads = new_heads(target, stored.config, stored.tensors.get(DRAFT_TOKENS))
    heads.set_vocab_bias(stored.has_vocab_bias)
    heads.load_state_dict(stored.tensors)
    heads.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    statistics = HeadStatistics.from_dict(stored.statistics) if stored.statistics else None
    if statistics is not None and statistics.num_heads != stored.config.num_heads:
        raise ValueError(
            f"{str(folder)!r} holds statistics of {statistics.num_heads} heads, but "
            f"{stored.config.num_heads} heads: it is damaged"
        )
    return LoadedHeads(heads, statistics, stored)


def _check_adapter(
    expected: Mapping[str, Any], target: TargetModel, folder: str | os.PathLike[str]
) -> None:
    got = adapter_digest(target.model)
    if got == expected.get("sha256"):
        return
    carried = "no adapter" if got is None else "another adapter"
    raise ValueError(
        f"these heads were trained together with an adapter of the target, and this target carries "
        f"{carried}: apply {str(Path(folder) / ADAPTER_FOLDER)!r} with peft.PeftModel."
        "from_pretrained, or let MedusaModel.from_pretrained load the target"
    )
