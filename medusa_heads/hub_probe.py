"""Whether the hub answers: asked once, before a library tries for half a minute."""

from __future__ import annotations

from medusa_heads.errors import first_line

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
