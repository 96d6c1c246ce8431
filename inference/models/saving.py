"""A model with heads written as a checkpoint folder, with all that came with the heads."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_heads.checkpoint.adapter import adapter_digest
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.checkpoint.files import ADAPTER_FILES, CARD_FILE, REPORT_FILES
from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.checkpoint.stored_heads import (
    CONFIG_FILE,
    SIDECAR_FILE,
    StoredHeads,
    read_sidecar,
)
from medusa_heads.files import read_json, replace_file
from medusa_heads.hub.folder import own_files
from medusa_heads.hub.names import is_local
from medusa_heads.hub.pull import copy_checkpoint

if TYPE_CHECKING:
    from medusa_heads.inference.models.medusa import MedusaModel


def save_model(
    model: MedusaModel, folder: str | os.PathLike[str], *, with_vocab_matrix: bool = False
) -> Path:
    """Write a checkpoint folder; see `MedusaModel.save_pretrained`.

    Raises:
        ValueError: the target carries an adapter that no checkpoint came with, or what came with
            the heads are links that lead elsewhere.
        OSError: the folder cannot be written.
    """
    stored, came_from = model.stored, model.checkpoint
    has_adapter = stored is not None and stored.adapter is not None
    if not has_adapter and adapter_digest(model.target.model) is not None:
        raise ValueError(
            "the target carries an adapter that these heads were not loaded with: write them with "
            "checkpoint.save_heads(..., adapter=), which stores both"
        )
    with tempfile.TemporaryDirectory() as staging:
        made = Path(staging)
        save_heads(
            made,
            model.heads,
            model.target,
            statistics=model.statistics,
            provenance=provenance() if stored is None else stored.provenance,
            with_vocab_matrix=with_vocab_matrix,
        )
        if stored is not None and came_from is not None:
            _carry_along(came_from, stored, made)
        copy_checkpoint(made, Path(folder))
    return Path(folder)


def _carry_along(came_from: Path, stored: StoredHeads, made: Path) -> None:
    """What a checkpoint holds beside the heads, and the name it knows their target by."""
    for name, path in own_files(came_from, (*REPORT_FILES, CARD_FILE, *ADAPTER_FILES)).items():
        (made / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, made / name)
    sidecar = read_sidecar(made) | {"adapter": stored.adapter}
    known_as = stored.target.get("name_or_path")
    # The same target may have been loaded from a copy, at a path that means nothing elsewhere.
    if known_as and not is_local(known_as, came_from):
        sidecar["target"] |= {"name_or_path": known_as, "revision": stored.target.get("revision")}
        foreign = read_json(made / CONFIG_FILE) | {"base_model_name_or_path": known_as}
        replace_file(made / CONFIG_FILE, json.dumps(foreign, indent=2) + "\n")
    replace_file(made / SIDECAR_FILE, json.dumps(sidecar, indent=2) + "\n")
