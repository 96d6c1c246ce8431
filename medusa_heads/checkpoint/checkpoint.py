"""A heads checkpoint and its target: saved from one, and loaded only onto the same.

What stands in the folder, `stored_heads.py` says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.adapter import ADAPTER_FOLDER, adapter_digest
from medusa_heads.checkpoint.stored_heads import (
    DRAFT_TOKENS,
    StoredHeads,
    read_sidecar,
    read_stored,
    write_stored,
)
from medusa_heads.checkpoint.vocab_matrix import check_takes_matrix
from medusa_heads.contents import SIDECAR_FILE
from medusa_heads.files import replace_file
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.masking import masked
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

    Raises:
        ValueError: no engine would read the matrix, or the adapter is no plain LoRA adapter.
        OSError: the folder cannot be written.
    """
    dtype = dtype or target.dtype
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in heads.state_dict().items()
    }
    of_adapter = None
    if adapter is not None:
        of_adapter = {"folder": ADAPTER_FOLDER, "sha256": adapter_digest(target.model)}
    stored = StoredHeads(
        config=heads.config,
        tensors=tensors,
        target={
            "name_or_path": target.name_or_path,
            "revision": target.revision,
            **target.fingerprint(),
        },
        statistics=statistics.to_dict() if statistics else None,
        provenance=provenance or {},
        adapter=of_adapter,
        vocab_matrix_VD=_copied_matrix(heads, dtype) if with_vocab_matrix else None,
    )
    return write_stored(folder, stored, adapter=adapter)


def replace_statistics(
    folder: str | os.PathLike[str], statistics: HeadStatistics, measured: Mapping[str, Any]
) -> None:
    """Store other statistics in a checkpoint folder. Everything else in it stays as it is.

    The sidecar is written beside its place and then renamed: whoever reads it meanwhile, or after
    an interruption, finds the old statistics or the new ones.

    Args:
        folder: the checkpoint.
        statistics: of its heads.
        measured: how they came to be; kept in the provenance as `calibrated`.

    Raises:
        ValueError: not a checkpoint, or its heads are others than those measured.
        OSError: the folder cannot be written.
    """
    sidecar = read_sidecar(folder)
    if sidecar["heads"].get("num_heads") != statistics.num_heads:
        raise ValueError(
            f"{str(folder)!r} holds {sidecar['heads'].get('num_heads')} heads, and the statistics "
            f"are of {statistics.num_heads}: measure the heads that lie there"
        )
    sidecar["statistics"] = statistics.to_dict()
    known = sidecar.get("provenance") or {}
    sidecar["provenance"] = masked(known | {"calibrated": dict(measured)})
    replace_file(Path(folder) / SIDECAR_FILE, json.dumps(sidecar, indent=2) + "\n")


def _copied_matrix(heads: DraftHeads, dtype: torch.dtype) -> Tensor:
    """The matrix [V, D] that the heads share with their target."""
    weight_VD, bias_V = heads.vocab_matrix(0)
    check_takes_matrix(heads.config, bias=bias_V is not None)
    return weight_VD.detach().to("cpu", dtype)


def load_heads(folder: str | os.PathLike[str], target: TargetModel) -> LoadedHeads:
    """Load heads onto their target, in its dtype and on its device.

    Raises:
        ValueError: a missing, damaged or ill-fitting checkpoint, or another target's, or one whose
            heads belong to an adapter that the target does not carry.
    """
    stored = read_stored(folder)
    _check_fingerprint(stored.target, target)
    if stored.adapter is not None:
        _check_adapter(stored.adapter, target, folder)
    heads = new_heads(target, stored.config, stored.tensors.get(DRAFT_TOKENS))
    heads.set_vocab_bias(f"0.{stored.config.num_layers}.bias" in stored.tensors)
    heads.load_state_dict(stored.tensors)
    heads.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    statistics = HeadStatistics.from_dict(stored.statistics) if stored.statistics else None
    if statistics is not None and statistics.num_heads != stored.config.num_heads:
        raise ValueError(
            f"{str(folder)!r} holds statistics of {statistics.num_heads} heads, but "
            f"{stored.config.num_heads} heads: it is damaged"
        )
    return LoadedHeads(heads, statistics, stored)


def _check_fingerprint(expected: Mapping[str, Any], target: TargetModel) -> None:
    got = target.fingerprint()
    # None stands for what heads of another project's making do not say.
    differing = [key for key in got if expected.get(key) not in (None, got[key])]
    if differing:
        wanted = {key: expected.get(key) for key in differing}
        found = {key: got[key] for key in differing}
        raise ValueError(
            f"these heads were trained for another target ({expected.get('name_or_path')!r}): "
            f"expected {wanted}, got {found}; pass the target they belong to"
        )


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
