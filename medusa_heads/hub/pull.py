"""Checkpoints that lie on a hub: found by name, and brought into a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_heads.checkpoint.adapter import ADAPTER_FOLDER
from medusa_heads.checkpoint.custom_generate import write_custom_generate
from medusa_heads.checkpoint.stored_heads import SIDECAR_FILE, read_sidecar
from medusa_heads.files import expanded, move_in, refuse_link, remove_leftovers, staging
from medusa_heads.hub.files import CARD_FILE, KEPT_FILES, LOADED_FILES
from medusa_heads.hub.folder import own_files
from medusa_heads.hub.names import check_repo_id, is_repo_id, split_revision
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
    """The folder that a checkpoint's name stands for: itself, or a download in the hub's cache.

    Only the files that loading reads are downloaded, and only those the cache has not.

    Args:
        name: a folder, or a repository as `user/name` or `user/name@revision`.
        revision: branch, tag or commit of a repository.
        token: of the hub; by default the one that was logged in with.
        cache_dir: of the downloads; by default the hub's own.
        local_files_only: take what was downloaded earlier, and ask no hub.
        force_download: download anew what the cache has.

    Raises:
        ValueError: no such folder or repository, none that holds heads, or a revision of a folder.
    """
    folder = expanded(name)
    repo_id, named = split_revision(name)
    if folder.exists() or not is_repo_id(repo_id):
        if revision is not None:
            raise ValueError(
                f"a revision ({revision!r}) is of a repository as user/name, and {str(name)!r} is "
                "none: leave it out"
            )
        read_sidecar(folder)  # refuses what is no checkpoint
        return folder
    if named is not None and revision not in (None, named):
        raise ValueError(f"got two revisions, {named!r} and {revision!r}: give one")
    try:
        return _download(
            repo_id,
            named or revision,
            LOADED_FILES,
            token,
            cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
        )
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
    cache_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Bring a repository's checkpoint into a folder, whole or not at all.

    Its `custom_generate/`, which transformers would run, is not downloaded but written anew.

    Args:
        repo_id: `user/name` or `user/name@revision`.
        out: the folder; by default one of the repository's name, here.
        revision, token, cache_dir: see `find_checkpoint`.
        overwrite: `out` may be a checkpoint that is replaced; its other files stay.

    Raises:
        ValueError: no such repository, none that holds heads, or `out` is in use.
    """
    repo_id, named = split_revision(repo_id)
    check_repo_id(repo_id)
    if named is not None and revision not in (None, named):
        raise ValueError(f"got two revisions, {named!r} and {revision!r}: give one")
    folder = Path(out) if out is not None else Path(repo_id.split("/")[1])
    remove_leftovers(folder.parent)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        replaceable = (folder / SIDECAR_FILE).is_file()
        if not (overwrite and replaceable):
            hint = "overwrite it (--overwrite), or " if replaceable else ""
            raise ValueError(f"{str(folder)!r} is in use: {hint}pull into another folder")
    found = _download(repo_id, named or revision, KEPT_FILES, token, cache_dir)
    copy_checkpoint(found, folder)
    return folder


def _download(
    repo_id: str,
    revision: str | None,
    files: Sequence[str],
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None,
    **options: Any,
) -> Path:
    """The snapshot folder of these files, as far as the repository has them."""
    from huggingface_hub import snapshot_download

    token = check_token(token)
    with in_one_sentence(repo_id, revision, token):
        found = snapshot_download(
            repo_id,
            revision=revision,
            token=token,
            cache_dir=None if cache_dir is None else Path(cache_dir),
            allow_patterns=list(files),
            **options,
        )
    if not (Path(found) / SIDECAR_FILE).is_file():
        raise ValueError(
            f"the repository {repo_id!r} holds no heads of this package (no {SIDECAR_FILE}): those "
            "of another project are read by medusa-heads convert"
        )
    read_sidecar(found)
    return Path(found)


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Copy a checkpoint's own files, beside their place first; earlier heads' files go. A folder
    that holds nothing yet is there whole, or not at all.

    Raises:
        ValueError: a file is a link that leads elsewhere, or none that a checkpoint has.
        OSError: the folder cannot be written.
    """
    present = own_files(source, KEPT_FILES)
    refuse_link(folder / ADAPTER_FOLDER)
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staging(folder.parent) as beside:
        staged = beside / folder.name
        for name, path in present.items():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, staged / name)
        write_custom_generate(staged)
        if not folder.exists() or not any(folder.iterdir()):
            move_in(beside, folder.parent, [folder.name])
            return
        write_custom_generate(folder)
        for name in present:
            (folder / name).parent.mkdir(exist_ok=True)
        # The sidecar comes last: it vouches for the weights.
        move_in(staged, folder, sorted(present, key=lambda name: name == SIDECAR_FILE))
        for name in set(KEPT_FILES) - {*present, CARD_FILE}:
            (folder / name).unlink(missing_ok=True)
