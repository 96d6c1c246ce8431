"""What came with heads that were loaded, when they are saved again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from medusa_heads.checkpoint.files import (
    ADAPTER_FILES,
    CARD_FILE,
    CONFIG_FILE,
    REPORT_FILES,
    WEIGHTS_FILE,
)
from medusa_heads.checkpoint.stored_heads import StoredHeads, read_sidecar
from medusa_heads.checkpoint.tensor_file import mapped_tensors
from medusa_heads.contents import SIDECAR_FILE, is_heads
from medusa_heads.files import is_path, read_json, replace_json
from medusa_heads.hub.folder import own_files
from medusa_heads.hub.names import local_target
from medusa_heads.masking import masked
from medusa_heads.trees.statistics import HeadStatistics


def carry_along(came_from: Path, stored: StoredHeads, made: Path, loaded_from: str) -> None:
    """Put into a checkpoint folder that was just made what the folder its heads were loaded from
    holds beside them: their adapter, the name it knows their target by, or where that was
    `loaded_from`, and, if the heads are still those, what was measured of them. Raises ValueError:
    a file is a link that leads elsewhere, or none that a checkpoint has."""
    same = is_heads(came_from) and _hold_the_same(came_from, made)
    measured = (*REPORT_FILES, CARD_FILE) if same else ()
    for name, path in own_files(came_from, (*measured, *ADAPTER_FILES)).items():
        (made / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, made / name)
    sidecar = read_sidecar(made) | {"adapter": stored.adapter}
    loaded = stored.statistics and HeadStatistics.from_dict(stored.statistics).to_dict()
    if sidecar["statistics"] != loaded:  # the user's own
        sidecar["provenance"].pop("calibrated", None)
    elif same:  # as reports are: measured anew, perhaps, since the heads were loaded
        now = read_sidecar(came_from)
        sidecar["statistics"] = now.get("statistics")
        sidecar["provenance"] = masked(now.get("provenance") or {})
    elif is_heads(came_from):
        sidecar["statistics"] = None
        sidecar["provenance"].pop("calibrated", None)
    target: dict[str, Any] = sidecar["target"]
    names = ("name_or_path", "revision")
    if stored.adapter is not None:  # it now lies beside, and so what carries it has a name
        target["name_or_path"] = loaded_from
    # In float16 a target says nothing of its weights, which the heads' own were known by.
    if target["lm_head_sha256"] is None and (
        same or all(target[name] == stored.target.get(name) for name in names)
    ):
        target["lm_head_sha256"] = stored.target.get("lm_head_sha256")
    known_as, revision = (stored.target.get(name) for name in names)
    # The same target may have been loaded from a copy, at a path that means nothing elsewhere.
    if known_as and not is_path(known_as) and local_target(known_as, revision, came_from) is None:
        target |= {name: stored.target.get(name) for name in names}
    foreign = read_json(made / CONFIG_FILE) | {"base_model_name_or_path": target["name_or_path"]}
    replace_json(made / CONFIG_FILE, foreign)
    replace_json(made / SIDECAR_FILE, sidecar)


def _hold_the_same(came_from: Path, made: Path) -> bool:
    """Whether the heads in a folder are those just stored, in whatever dtype these are."""
    new = mapped_tensors(made / WEIGHTS_FILE)
    try:
        old = mapped_tensors(came_from / WEIGHTS_FILE)
    except ValueError:  # removed or damaged since
        return False
    return old.keys() == new.keys() and all(
        torch.equal(old[name].to(tensor.dtype), tensor) for name, tensor in new.items()
    )
