"""Whether the hub answers: asked once, before a library tries for half a minute."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medusa_heads.errors import first_line
from medusa_heads.files import is_path

_PATIENCE_S = 5


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
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        alone = on_hub(name) and (never or hub_failure() is not None)
        yield {"local_files_only": True} if alone else {}
    finally:
        logger.setLevel(level)


def on_hub(name: str) -> bool:
    """Whether a model's name is none of a folder here."""
    return not is_path(name) and not Path(name).is_dir()
