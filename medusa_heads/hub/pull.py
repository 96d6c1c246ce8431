"""Checkpoints that lie on a hub: found by name, and brought into a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from medusa_heads.checkpoint.adapter import read_adapter
from medusa_heads.checkpoint.files import (
    ADAPTER_FOLDER,
    CARD_FILE,
    KEPT_FILES,
    LOADED_FILES,
    OWN_FILES,
    filled,
    staged,
    write_custom_generate,
)
from medusa_heads.checkpoint.stored_heads import read_sidecar, read_stored
from medusa_heads.contents import SIDECAR_FILE, is_heads, refuse_model
from medusa_heads.files import check_folder, expanded, refuse_link, remove_leftovers
from medusa_heads.hub.folder import own_files
from medusa_heads.hub.names import (
    check_repo_id,
    is_repo_id,
    refuse_revision,
    split_revision,
    wanted_revision,
)
from medusa_heads.hub.talking import check_token, in_one_sentence


def find_checkpoint(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """The folder that a checkpoint's name stands for: a folder itself, or of a repository as
    `user/name` or `user/name@revision` a download in the hub's cache, of the files alone that
    loading reads. Options are those of huggingface_hub's downloads. Raises ValueError: no such
    folder or repository, none that holds heads, or a revision of a folder."""
    folder = expanded(name)
    repo_id, _ = split_revision(name)
    if folder.exists() or not is_repo_id(repo_id):
        refuse_revision(name, revision)
        read_sidecar(folder)  # refuses what is no checkpoint
        return folder
    revision = wanted_revision(name, revision)
    options = {"local_files_only": local_files_only, "force_download": force_download}
    cache = {"cache_dir": cache_dir and os.fspath(cache_dir)}
    try:
        return _download(repo_id, revision, LOADED_FILES, token, **options, **cache)
    except ValueError as error:
        raise ValueError(
            f"expected a heads checkpoint at {str(name)!r}: there is no such folder, and {error}"
        ) from None


def pull(
    repo_id: str,
    out: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    overwrite: bool = False,
) -> Path:
    """Bring a repository's checkpoint, `user/name` or `user/name@revision`, into a folder, by
    default one of its name, whole or not at all. A checkpoint that stands there is replaced where
    `overwrite` says so; its other files stay. `custom_generate/`, which transformers would run, is
    not downloaded but written anew. Raises ValueError: no such repository, none that holds heads,
    or damaged ones, the hub cannot be asked, or `out` is in use."""
    name = check_repo_id(split_revision(repo_id)[0])
    revision = wanted_revision(repo_id, revision)
    out = name.split("/")[1] if out is None else out
    check_folder(out)
    folder = expanded(out)
    place = folder.resolve()
    for part in (place, place.parent):
        remove_leftovers(part)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        replaceable = is_heads(place)
        if not (overwrite and replaceable):
            hint = "overwrite it (--overwrite), or " if replaceable else ""
            raise ValueError(f"{str(folder)!r} is in use: {hint}pull into another folder")
    _ask_for(name, revision, token)
    found = _download(name, revision, KEPT_FILES, token)
    if read_stored(found).adapter is not None:  # damaged heads take nobody's place
        read_adapter(found / ADAPTER_FOLDER)
    copy_checkpoint(found, folder)
    return folder


def _ask_for(repo_id: str, revision: str | None, token: str | bool | None) -> None:
    """Raises ValueError where the hub does not hand out the repository, or cannot be reached: a
    download would then bring what was downloaded earlier, unsaid."""
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        token = check_token(token)
        with in_one_sentence(repo_id, revision, token):
            HfApi(token=token).model_info(repo_id, revision=revision)


def _download(
    repo_id: str,
    revision: str | None,
    files: Sequence[str],
    token: str | bool | None,
    **options: Any,
) -> Path:
    """The snapshot folder of these files, as far as the repository has them."""
    from huggingface_hub import snapshot_download

    token = check_token(token)
    with in_one_sentence(repo_id, revision, token):
        options |= {"revision": revision, "token": token, "allow_patterns": list(files)}
        found = Path(snapshot_download(repo_id, **options))
    if not (found / SIDECAR_FILE).is_file():
        raise ValueError(
            f"the repository {repo_id!r} holds no heads of this package (no {SIDECAR_FILE}): those "
            "of another project are read by medusa-heads convert"
        )
    read_sidecar(found)
    return found


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Copy a checkpoint's own files, beside their place first; earlier heads' files go. A folder
    that is not there yet is there whole, or not at all. Raises ValueError: a file is a link that
    leads elsewhere, or none that a checkpoint has, or would be written over and is none of earlier
    heads; OSError: the folder cannot be written."""
    present = own_files(source, KEPT_FILES)
    refuse_link(folder / ADAPTER_FOLDER)
    folder = folder.resolve()
    replaced = is_heads(folder)
    if not replaced:
        _refuse_files(folder, {*OWN_FILES} - {CARD_FILE} | present.keys())
        refuse_model(folder)
    in_use = folder.exists() and any(folder.iterdir())
    # The sidecar comes last: it vouches for the weights.
    with filled(folder, SIDECAR_FILE) if in_use else staged(folder) as made:
        for name, path in present.items():
            (made / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, made / name)
        write_custom_generate(made)
    for name in set(KEPT_FILES) - {*present, CARD_FILE} if replaced else ():
        (folder / name).unlink(missing_ok=True)


def _refuse_files(folder: Path, names: Iterable[str]) -> None:
    """Raises ValueError where files lie in a folder that heads would take for their own, and so
    write over, remove or publish."""
    if found := sorted(name for name in names if os.path.lexists(folder / name)):
        raise ValueError(
            f"{str(folder)!r} holds no heads, but files under names that heads use "
            f"({', '.join(found)}): name another folder for heads"
        )
