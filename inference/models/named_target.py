"""The target that a checkpoint names: where it is, and at which revision."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from medusa_heads.checkpoint.stored_heads import read_sidecar
from medusa_heads.contents import is_model
from medusa_heads.hub.names import is_repo_id, split_revision
from medusa_heads.target.loading import refuse_code_of
from medusa_heads.target.target import TargetModel

Read = Callable[[str | os.PathLike[str]], Mapping[str, Any]]


def load_target(
    checkpoint: str | os.PathLike[str],
    given: str | os.PathLike[str] | None,
    *,
    read: Read = read_sidecar,
    **options: Any,
) -> TargetModel:
    """Load the target of a checkpoint folder.

    Args:
        checkpoint: names it, and the revision its heads were trained on.
        given: hub id (`user/name` or `user/name@revision`) or path, to be loaded instead.
        read: reads the sidecar of heads, or of a draft model.
        options: of `TargetModel.from_pretrained`; a `revision` among them beats the checkpoint's.

    Raises:
        ValueError: the checkpoint names no target, or nothing loadable is there; or code of a
            target that only the checkpoint names would be run.
    """
    if given is None:
        trusted = bool(options.get("trust_remote_code"))
        name, revision = named_target(checkpoint, read, trust_remote_code=trusted)
    else:
        name, revision = split_revision(given)
    if revision is not None:
        options.setdefault("revision", revision)
    try:
        return TargetModel.from_pretrained(name, **options)
    except ValueError as error:
        if given is not None:
            raise
        raise ValueError(
            f"{error} (the files in {str(checkpoint)!r} name it as their target; pass target= "
            "(--target) where it is elsewhere)"
        ) from error


def named_target(
    checkpoint: str | os.PathLike[str],
    read: Read = read_sidecar,
    *,
    trust_remote_code: bool = False,
) -> tuple[str, str | None]:
    """Hub id or path of the target that a checkpoint folder names, and a hub id's revision.

    Args:
        checkpoint: a folder.
        read: reads the sidecar of heads, or of a draft model.
        trust_remote_code: code that comes with the target is to be run.

    Raises:
        ValueError: not a checkpoint, or it names none; or code of what it names would be run.
    """
    target = read(checkpoint)["target"]
    name, revision = target.get("name_or_path"), target.get("revision")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"the checkpoint {str(checkpoint)!r} does not name its target: pass target= (--target)"
        )
    if trust_remote_code:
        refuse_code_of(target)
    if Path(name).exists():
        return name, None
    on_hub = is_repo_id(name) or "/" not in name  # gpt2
    of_hub = revision if on_hub and isinstance(revision, str) else None
    # A relative path was relative to where training ran, mostly above what training wrote.
    folder = Path(os.path.abspath(checkpoint))
    for place in (folder, *(folder.parents if of_hub is None else ())):
        if (place / name).exists() and (place == folder or is_model(place / name)):
            return str(place / name), None
    return name, of_hub
