"""Talking to a hub: what goes wrong, in one sentence, and never with the token in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from medusa_heads.errors import first_line
from medusa_heads.hub_probe import Together, quiet_client
from medusa_heads.masking import masked_text, without_passwords

# How a client fails on an answer that it does not expect.
_TRIPPED = (LookupError, AttributeError, TypeError, ArithmeticError, AssertionError)
# Of an answer to HEAD: what files in the client's cache are named by.
_NAMING = ("ETag", "X-Linked-ETag", "X-Repo-Commit")
_NAME = re.compile(r"[\w+=-][\w.+=-]{0,199}")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def check_token(token: str | bool | None) -> str | bool | None:
    """The token without white space around it. Raises ValueError: it cannot stand in a request; an
    HTTP library's own words would quote it."""
    if not isinstance(token, str):
        return token
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"the token given is not one of a hub: {LOG_IN}")
    return token


class _LeadsElsewhere(ValueError):
    """An answer names a file of the cache that lies outside of it."""


@contextmanager
def in_one_sentence(
    repo_id: str, revision: str | None = None, token: str | bool | None = None
) -> Iterator[None]:
    """Around calls of huggingface_hub: its errors become ValueErrors of one sentence. They are
    raised without their cause, whose text is a server's and could hold anything."""
    from huggingface_hub import constants, get_session, get_token
    from huggingface_hub.errors import HTTPError  # of whichever HTTP library the client is built on

    try:
        get_session()
    except (OSError, ValueError, ImportError) as error:  # the environment's proxy, certificates, ..
        why = masked_text(first_line(error))
        raise ValueError(
            without_passwords(f"the hub at {constants.ENDPOINT}")
            + f" cannot be asked for {repo_id!r}: {why}"
        ) from None
    try:
        with quiet_client(), _watched_client():
            yield
    except (OSError, ValueError, RuntimeError, HTTPError, *_TRIPPED) as error:
        sentence = without_passwords(_sentence(error, repo_id, revision))
        for secret in (token, get_token()):
            if isinstance(secret, str) and secret:
                sentence = sentence.replace(secret, "***")
        raise ValueError(sentence) from None


def _watch() -> Callable[[], object]:
    from huggingface_hub import get_session

    client = get_session()
    hooks = client.event_hooks
    client.event_hooks = {**hooks, "response": [*hooks.get("response", []), _check_names]}
    return lambda: setattr(client, "event_hooks", hooks)


_watched_client = Together(_watch)


def _check_names(answer: Any) -> None:
    """The client calls a file of its cache by what the hub says is its hash, unseen: a name such as
    `../../x` would be written to."""
    for name in _NAMING if answer.request.method == "HEAD" else ():
        said = (answer.headers.get(name) or "").removeprefix("W/").strip('"')
        if said and not _NAME.fullmatch(said):
            raise _LeadsElsewhere(f"its answer calls a file {said[:80]!r}")


def _sentence(error: BaseException, repo_id: str, revision: str | None) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = f"the hub at {constants.ENDPOINT}"
    if isinstance(error, _TRIPPED):
        tripped = f"({type(error).__name__})"
        return f"{hub} answered what its client cannot read for {repo_id!r} {tripped}"
    if isinstance(error, _LeadsElsewhere):
        return f"{hub} is not to be trusted with {repo_id!r}: {error}"
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    answer = next((each for each in causes if isinstance(each, HfHubHTTPError)), None)
    if answer is None:
        if constants.HF_HUB_OFFLINE:
            return f"{repo_id!r} is not in the local cache, and HF_HUB_OFFLINE is set: unset it"
        if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is None:
            return f"{repo_id!r} is not in the local cache, and local_files_only asks no hub"
        reason = first_line(causes[-1] if str(causes[-1]).strip() else error)
        if isinstance(error, OSError) and error.errno is not None:  # of this machine: a full disk
            return f"{repo_id!r} could not be brought here: {reason}"
        return f"{hub} cannot be reached for {repo_id!r}: {reason}"
    status = answer.response.status_code
    said = " ".join((answer.server_message or "").split())
    because = f" ({said})" if said else ""
    if isinstance(answer, RevisionNotFoundError):
        return f"the repository {repo_id!r} has no revision {revision or 'main'!r}"
    if isinstance(answer, GatedRepoError):
        return f"access to {repo_id!r} must be asked for on its page{because}"
    if status == 401 and "invalid" in said.lower():
        return f"the hub does not know this token: {LOG_IN}"
    if isinstance(answer, RepositoryNotFoundError) or status in (401, 404):
        return (
            f"the hub has no repository {repo_id!r}, or it is private and the token may not read "
            f"it: check the name, or {LOG_IN}"
        )
    if status == 403:
        do = "read" if answer.response.request.method in ("GET", "HEAD") else "write to"
        return f"the token may not {do} {repo_id!r}{because}: {LOG_IN} with one that may"
    if status in (409, 412):
        return f"{repo_id!r} was changed by someone else meanwhile{because}: push again"
    return f"the hub answered {status} for {repo_id!r}{because}"
