"""Whether the hub answers: asked once, before a library tries for half a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from medusa_heads.errors import first_line
from medusa_heads.files import is_path

_PATIENCE_S = 5


class Together:
    """A change that is made when the first block is entered, in whichever thread, and undone when
    the last one ends: `make` makes it, and returns what undoes it."""

    def __init__(self, make: Callable[[], Callable[[], object]]) -> None:
        self._make, self._lock, self._inside = make, Lock(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._undo = self._make()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._undo()


def _silence() -> Callable[[], object]:
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    return lambda: logger.setLevel(level)


quiet_client = Together(_silence)
"""The hub's client warns of every attempt; the error that follows says it once."""


def hub_failure() -> str | None:
    """Why the hub does not answer; None where it does."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "the hub is switched off by HF_HUB_OFFLINE"
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:  # which one it is, the HTTP library of the hub's client decides
        return f"the hub cannot be reached: {first_line(error)}"
    return None


@contextmanager
def asking_hub(name: str, *, never: bool = False) -> Iterator[dict[str, Any]]:
    """Around a `from_pretrained` of transformers, with options for it.

    The hub's client tries each file five times, for half a minute, and reports every attempt. A
    hub that cannot be reached, or `never` is to be, is not asked at all; what was downloaded
    earlier is still found.
    """
    with quiet_client():
        alone = on_hub(name) and (never or hub_failure() is not None)
        yield {"local_files_only": True} if alone else {}


def on_hub(name: str) -> bool:
    """Whether a model's name is none of a folder here."""
    return not is_path(name) and not Path(name).is_dir()
