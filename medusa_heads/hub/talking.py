"""Talking to a hub: what goes wrong, in one sentence, and never with the token in it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# How a client fails on an answer that it does not expect.
_TRIPPED = (LookupError, AttributeError, TypeError, ArithmeticError, AssertionError)
# Of an answer to HEAD: what files in the client's cache are named by.
_NAMING = ("ETag", "X-Linked-ETag", "X-Repo-Commit")
_NAME = re.compile(r"[\w+=-][\w.+=-]{0,199}")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def check_token(token: str | bool | None) -> str | bool | None:
    """The token without white space around it.

    Raises:
        ValueError: it cannot stand in a request; an HTTP library's own words would quote it.
    """
    if not isinstance(token, str):
        return token
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"the token given is not one of a hub: {LOG_IN}")
    return token


@contextmanager
def in_one_sentence(
    repo_id: str, revision: str | None = None, token: str | bool | None = None
) -> Iterator[None]:
    """Around calls of huggingface_hub: its errors become ValueErrors of one sentence.

    They are raised without their cause, whose text is a server's and could hold anything.
    """
    from huggingface_hub.errors import HTTPError  # of whichever HTTP library the client is built on

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of every attempt; the error that follows says it once
    try:
        with _no_paths_of_theirs():
            yield
    except (OSError, ValueError, RuntimeError, HTTPError, *_TRIPPED) as error:
        sentence = _sentence(error, repo_id, revision)
        raise ValueError(_without_token(sentence, token)) from None
    finally:
        logger.setLevel(level)


class _LeadsElsewhere(ValueError):
    """An answer names a file of the cache that lies outside of it."""


@contextmanager
def _no_paths_of_theirs() -> Iterator[None]:
    """The client calls a file of its cache by what the hub says is its hash, unseen: a name such
    as `../../x` would be written to."""
    from huggingface_hub import get_session

    client = get_session()
    before = client.event_hooks

    def check(answer: Any) -> None:
        for name in _NAMING if answer.request.method == "HEAD" else ():
            said = (answer.headers.get(name) or "").removeprefix("W/").strip('"')
            if said and not _NAME.fullmatch(said):
                raise _LeadsElsewhere(f"its answer calls a file {said[:80]!r}")

    client.event_hooks = {**before, "response": [*before.get("response", []), check]}
    try:
        yield
    finally:
        client.event_hooks = before


def _sentence(error: BaseException, repo_id: str, revision: str | None) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    answer = _answer(error)
    if isinstance(error, _TRIPPED):
        return (
            f"the hub at {constants.ENDPOINT} answered what its client cannot read for "
            f"{repo_id!r} ({type(error).__name__})"
        )
    if isinstance(error, _LeadsElsewhere):
        return f"the hub at {constants.ENDPOINT} is not to be trusted with {repo_id!r}: {error}"
    if not isinstance(answer, HfHubHTTPError):
        if constants.HF_HUB_OFFLINE:
            return f"{repo_id!r} is not in the local cache, and HF_HUB_OFFLINE is set: unset it"
        if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is None:
            return f"{repo_id!r} is not in the local cache, and local_files_only asks no hub"
        if isinstance(error, OSError) and error.errno is not None:  # of this machine: a full disk
            return f"{repo_id!r} could not be brought here: {_first_line(error)}"
        return (
            f"the hub at {constants.ENDPOINT} cannot be reached for {repo_id!r}: "
            f"{_first_line(error)}"
        )
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
        return f"the token may not write to {repo_id!r}{because}: {LOG_IN} with one that may"
    if status in (409, 412):
        return f"{repo_id!r} was changed by someone else meanwhile{because}: push again"
    return f"the hub answered {status} for {repo_id!r}{because}"


def _answer(error: BaseException) -> BaseException:
    """The hub's own answer, where the client wrapped it into another error."""
    from huggingface_hub.errors import HfHubHTTPError

    found: BaseException | None = error
    while found is not None and not isinstance(found, HfHubHTTPError):
        found = found.__cause__
    return error if found is None else found


def _first_line(error: BaseException) -> str:
    """What happened, from the innermost error that says something."""
    innermost = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    for each in (innermost, error):
        if text := str(each).strip():
            return text.splitlines()[0]
    return type(error).__name__


def _without_token(text: str, token: str | bool | None) -> str:
    from huggingface_hub import get_token

    for secret in (token, get_token()):
        if isinstance(secret, str) and secret:
            text = text.replace(secret, "***")
    return text
