"""Names of repositories, and how they are told from paths."""

from __future__ import annotations

import os
from pathlib import Path

from medusa_heads.contents import is_model
from medusa_heads.files import is_path


def split_revision(name: str | os.PathLike[str]) -> tuple[str, str | None]:
    """`user/heads@v2` is revision `v2` of the repository `user/heads`."""
    repo_id, _, revision = os.fspath(name).partition("@")
    return (repo_id, revision) if revision and is_repo_id(repo_id) else (os.fspath(name), None)


def wanted_revision(name: str | os.PathLike[str], revision: str | None) -> str | None:
    """The revision behind a repository's name, or the one given. Raises ValueError: there are
    two, or the one given is empty."""
    named = split_revision(name)[1]
    if revision == "":
        raise ValueError("expected a branch, tag or commit, got '': leave the revision out")
    if named is not None and revision not in (None, named):
        raise ValueError(f"got two revisions, {named!r} and {revision!r}: give one")
    return named or revision


def refuse_revision(name: str | os.PathLike[str], revision: str | None) -> None:
    """Raises ValueError where a revision is given of what is no repository of a hub."""
    if revision is not None:
        raise ValueError(
            f"a revision ({revision!r}) is of a repository as user/name, and {os.fspath(name)!r} "
            "is none: leave it out"
        )


def is_repo_id(name: str) -> bool:
    """Whether a hub could have a repository of this name; one without a user is not looked for."""
    return name.count("/") == 1 and could_be_on_hub(name)


def could_be_on_hub(name: str) -> bool:
    """The same, also of the hub's own old names without a user, such as gpt2."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def check_repo_id(name: str) -> str:
    """The name, if a hub could have a repository of it. Raises ValueError: it could not."""
    if not is_repo_id(name):
        raise ValueError(f"expected the name of a repository as user/name, got {name!r}")
    return name


def is_local(name: str) -> bool:
    """Whether a target's or dataset's name is a path, read from here."""
    return is_path(name) or Path(name).exists()


def local_target(name: str, revision: str | None, checkpoint: str | os.PathLike[str]) -> str | None:
    """Where the target lies that a checkpoint's files name by a path; None where there is no such
    folder, or the name is of a hub. ValueError where a configuration cannot be read."""
    if Path(name).exists():
        return name
    on_hub = revision is not None and (is_repo_id(name) or "/" not in name)  # gpt2
    # A relative path was relative to where training ran, mostly above what training wrote.
    folder = Path(os.path.abspath(checkpoint))
    for place in (folder, *(() if on_hub else folder.parents)):
        if (place / name).exists() and (place == folder or is_model(place / name)):
            return str(place / name)
    return None
