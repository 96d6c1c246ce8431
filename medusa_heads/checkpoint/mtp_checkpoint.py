"""A target's multi-token-prediction modules on disk, trained on, without the target.

model.safetensors   their weights, under the names and in the pieces of the target's own checkpoint
mtp_modules.json    target fingerprint, measured figures, provenance
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medusa_heads.checkpoint.checkpoint import vouch
from medusa_heads.checkpoint.files import filled, read_record
from medusa_heads.checkpoint.stored_heads import check_same_target
from medusa_heads.checkpoint.tensor_file import mapped_tensors, read_tensors, write_tensors
from medusa_heads.contents import MTP_FILE
from medusa_heads.target.fingerprint import file_sha256
from medusa_heads.target.mtp import load_mtp, own_parts, stored_tensors
from medusa_heads.target.target import TargetModel

MTP_WEIGHTS = "model.safetensors"


def save_mtp(
    folder: str | os.PathLike[str],
    modules: Any,
    target: TargetModel,
    *,
    source: str | os.PathLike[str] | None = None,
    measured: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write modules, in the dtypes they have, beside their place first and then renamed, file by
    file. `source` is what `load_mtp` took them from. Raises ValueError: read again they would be
    others; OSError: the folder cannot be written."""
    folder = Path(folder)
    tensors = stored_tensors(target, modules, source)
    with filled(folder, MTP_WEIGHTS, MTP_FILE) as made:
        write_tensors(made / MTP_WEIGHTS, tensors)
        again = own_parts(load_mtp(target, made)).state_dict()
        for name, tensor in own_parts(modules).state_dict().items():
            if not torch.equal(tensor, again[name]):
                raise ValueError(
                    f"multi-token-prediction modules of {target.config.model_type} do not come "
                    f"back from the names of their checkpoint as they were ({name} differs)"
                )
        own = {"weights_sha256": file_sha256(made / MTP_WEIGHTS), "modules": len(modules.layers)}
        vouch(made / MTP_FILE, folder, target, measured, provenance, **own)
    return folder


def read_mtp_sidecar(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save_mtp` wrote beside the weights. Raises ValueError: there is none, or it cannot be
    read."""
    path = Path(folder) / MTP_FILE
    if not path.is_file():
        raise ValueError(
            f"expected multi-token-prediction modules (a folder with {MTP_FILE}) at "
            f"{str(folder)!r}, found none: train them with train-heads --mtp"
        )
    return read_record(path, needed=("target", "measured", "provenance"))


def read_mtp_tensors(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The weights of such a folder, by the names of the target's checkpoint. Raises ValueError: see
    `check_mtp`; or a value is not finite."""
    _check_weights(folder)
    return read_tensors(Path(folder) / MTP_WEIGHTS)


def check_mtp(folder: str | os.PathLike[str], target: TargetModel) -> str:
    """The digest of modules that were trained. Raises ValueError: they cannot be this target's:
    another's, or a file is missing or damaged."""
    check_same_target("modules", read_mtp_sidecar(folder)["target"], target.fingerprint())
    return _check_weights(folder)


def _check_weights(folder: str | os.PathLike[str]) -> str:
    sidecar, path = read_mtp_sidecar(folder), Path(folder) / MTP_WEIGHTS
    mapped_tensors(path)
    digest = file_sha256(path)
    if digest != sidecar.get("weights_sha256"):
        raise ValueError(
            f"{path} is not the file that {MTP_FILE} was written for (its checksum differs): "
            "copy it anew, or train the modules again"
        )
    return digest
