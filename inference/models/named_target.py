"""The target of a checkpoint: in memory, or where the checkpoint says, at which revision."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from medusa_heads.checkpoint.stored_heads import read_sidecar
from medusa_heads.errors import NoModel
from medusa_heads.hub.names import is_repo_id, local_target, split_revision
from medusa_heads.target.loading import refuse_code_of
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:  # heavy to import
    from transformers import PreTrainedModel

Read = Callable[[str | os.PathLike[str]], Mapping[str, Any]]


def load_target(
    checkpoint: str | os.PathLike[str],
    given: str | os.PathLike[str] | TargetModel | PreTrainedModel | None,
    *,
    read: Read = read_sidecar,
    hub: Mapping[str, Any] | None = None,
    **options: Any,
) -> TargetModel:
    """The target of a checkpoint folder, which names it and its revision; or the one given instead:
    a model in memory, or a hub id (`user/name` or `user/name@revision`) or path of one to load.
    Raises ValueError: the checkpoint names no target, or nothing loadable is there; or code of a
    target that only the checkpoint names would be run; or options for one in memory.

    Args:
        read: reads the sidecar of heads, or of a draft model.
        hub: more options, which a target in memory may be given too.
        options: of `TargetModel.from_pretrained`; a `revision` among them beats the checkpoint's.
    """
    if given is not None and not isinstance(given, str | os.PathLike):
        if options:
            raise ValueError(
                f"{sorted(options)} apply to a target that is loaded here, but one in memory was "
                "given: leave them out"
            )
        return given if isinstance(given, TargetModel) else TargetModel(given)
    options |= hub or {}
    if given is None:
        trusted = bool(options.get("trust_remote_code"))
        name, revision = named_target(checkpoint, read, trust_remote_code=trusted)
    else:
        name, revision = split_revision(given)
    if revision is not None:
        options.setdefault("revision", revision)
    try:
        return TargetModel.from_pretrained(name, **options)
    except NoModel as error:
        if given is not None:
            raise
        raise NoModel(
            f"{error} (the files in {str(checkpoint)!r} name it as their target; pass target= "
            "(--target) where it is elsewhere)"
        ) from error


def named_target(
    checkpoint: str | os.PathLike[str],
    read: Read = read_sidecar,
    *,
    trust_remote_code: bool = False,
) -> tuple[str, str | None]:
    """Hub id or path of the target that a checkpoint folder names, and a hub id's revision. Raises
    ValueError: not a checkpoint, or it names none; or code of what it names would be run."""
    target = read(checkpoint)["target"]
    name, revision = target.get("name_or_path"), target.get("revision")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"the checkpoint {str(checkpoint)!r} does not name its target: pass target= (--target)"
        )
    if trust_remote_code:
        refuse_code_of(target)
    revision = revision if isinstance(revision, str) else None
    if (found := local_target(name, revision, checkpoint)) is not None:
        return found, None
    return name, revision if is_repo_id(name) or "/" not in name else None  # gpt2
